"""docs/troubleshooting.md quotes errors that the code has, and the codes that it sends."""

import re
from itertools import chain

import grpc
import pytest

from services.runtime.errors import ERROR_CODES
from tests.deploy.observed import ROOT

TEXT = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
CODE = re.compile(r"^\| ([A-Z_]+) \| (\d+) \| `(\w+)` \|", re.MULTILINE)
QUOTED = re.compile(r"^\| `([^`]+)` \| ", re.MULTILINE)


def test_the_table_of_codes_is_the_codes() -> None:
    by_number = {code.value[0]: code.name for code in grpc.StatusCode}
    assert CODE.findall(TEXT) == [
        (by_number[codes.number], str(codes.http), codes.label) for codes in ERROR_CODES.values()
    ]


@pytest.fixture(scope="module")
def source() -> str:
    """All code, with literals that were cut in two joined."""
    files = chain(*((ROOT / each).rglob("*.py") for each in ("services", "engine", "kvtransfer")))
    whole = "\n".join(path.read_text("utf-8") for path in files)
    return re.sub(r'"\s*f?"', "", whole)


@pytest.mark.parametrize("message", QUOTED.findall(TEXT))
def test_every_quoted_message_is_one_of_the_code(message: str, source: str) -> None:
    pieces = [piece.strip() for piece in message.split("…") if piece.strip()]
    assert pieces
    pattern = r"[^\"\n]*?".join(re.escape(piece) for piece in pieces)
    assert re.search(pattern, source), message
