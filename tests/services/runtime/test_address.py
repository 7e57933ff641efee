"""Hosts and ports as text."""

import pytest

from services.runtime.address import check_bind, is_loopback, join_address, numeric_host
from services.runtime.errors import InvalidArgument


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("10.1.2.3", False), ("example.org", False)],
)  # fmt: skip
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_addresses() -> None:
    assert join_address("127.0.0.1", 5) == "127.0.0.1:5"
    assert join_address("::1", 5) == join_address("[::1]", 5) == "[::1]:5"
    assert numeric_host("localhost") == "127.0.0.1"
    assert numeric_host("::1") == "::1"


def test_others_are_served_only_when_that_was_said() -> None:
    check_bind("127.0.0.1", insecure=False)
    check_bind("0.0.0.0", insecure=True)
    with pytest.raises(InvalidArgument, match=r"--host: 0\.0\.0\.0 can be reached"):
        check_bind("0.0.0.0", insecure=False)
