"""``kvrelay status``: the instances of a cluster and how full they are.

Called by ``main``.
"""

import asyncio
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from services.cli.client import cluster_status, connected

STATE_STYLES = {"ready": "green", "draining": "yellow", "lost": "red"}


async def _fetch(address: str) -> dict[str, Any]:
    async with connected(address) as channel:
        return await cluster_status(channel)


def table_of(status: dict[str, Any]) -> Table:
    """One row an instance."""
    table = Table(title=f"model {status['model']}", title_justify="left", box=None)
    for name in ("role", "instance", "address", "state"):
        table.add_column(name)
    for name in ("free", "cached", "held", "quarantined", "of blocks"):
        table.add_column(name, justify="right")
    for name in ("running", "waiting", "handoffs"):
        table.add_column(name, justify="right")
    for each in status["instances"]:
        style = STATE_STYLES.get(each["state"], "")
        blocks = ("free", "cached", "held", "quarantined", "total")
        table.add_row(
            each["role"],
            each["instance_id"],
            each["address"],
            f"[{style}]{each['state']}[/]" if style else each["state"],
            *(str(each[f"blocks_{name}"]) for name in blocks),
            *(str(each[f"requests_{name}"]) for name in ("running", "waiting")),
            str(each["handoffs_active"]),
        )
    return table


def run(address: str, *, as_json: bool) -> None:
    """Raises: ServiceError or grpc.aio.AioRpcError: there is no answer, and why."""
    status = asyncio.run(_fetch(address))
    if as_json:
        print(json.dumps(status))
    else:
        Console().print(table_of(status))
