"""Hosts and ports as text: what is loopback, what may be bound, how an address is written.

No network and no gRPC here, so that the command line can use it and still start at once.
"""

import ipaddress

from services.runtime.errors import InvalidArgument


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_bind(host: str, insecure: bool, remedy: str = "encryption") -> None:
    """Refuse to serve others unless that is safe, or was said aloud.

    Args:
        insecure: it is either.
        remedy: what would make it safe.

    Raises:
        InvalidArgument: ``host`` is not loopback and ``insecure`` is not set.
    """
    if not insecure and not is_loopback(host):
        raise InvalidArgument(
            "--host",
            f"{host} can be reached from other machines, without encryption or keys: "
            f"give it {remedy}, add --insecure if that is meant, or use 127.0.0.1",
        )


def join_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 host."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def numeric_host(host: str) -> str:
    """``localhost`` as one address: its name stands for two, and port 0 would differ on them."""
    return "127.0.0.1" if host == "localhost" else host
