"""``kvrelay trace``: where the time of one finished request went, for ui.perfetto.dev.

Asks a router over HTTP. Mounted by ``main``.
"""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import ROUTER
from services.runtime.errors import InvalidArgument, NotFound, Unavailable

if TYPE_CHECKING:
    from urllib.error import HTTPError

CALL_S = 10.0
SCHEMES = ("http://", "https://")


def command(
    request_id: Annotated[
        str, typer.Argument(metavar="REQUEST_ID", help="From the answer, or the router's log.")
    ],
    url: Annotated[
        str, typer.Option("--url", envvar="KVRELAY_URL", help="HTTP address of its router.")
    ] = f"http://{ROUTER.host}:{ROUTER.http_port}",
) -> None:
    """Print where the time of a finished request went, layer by layer: JSON for ui.perfetto.dev."""
    print(fetch(url, request_id))


def fetch(url: str, request_id: str) -> str:
    """The trace, as JSON.

    Raises:
        NotFound: the router knows no such request, any more.
        Unavailable: no router answers there.
        InvalidArgument: ``url`` is no HTTP address.
    """
    from urllib.error import HTTPError
    from urllib.parse import quote
    from urllib.request import urlopen

    if not url.startswith(SCHEMES):
        raise InvalidArgument("--url", f"{url} is no HTTP address: say http://HOST:PORT")
    asked = f"{url.rstrip('/')}/debug/requests/{quote(request_id, safe='')}"
    try:
        with urlopen(asked, timeout=CALL_S) as answer:
            return json.dumps(json.load(answer))
    except HTTPError as error:
        with error:
            raise NotFound(f"{request_id}: {_message(error)}") from None
    except (OSError, ValueError) as error:
        raise Unavailable(f"no router answers at {url}: {error}") from None


def _message(error: "HTTPError") -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"
