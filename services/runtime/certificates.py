"""Which certificates a process has: paths, checked before anything starts. No gRPC here.

Two sets of files: the public ports', which clients check (and which may ask clients for one of
their own), and the internal ones', which every part of a cluster shows to every other. Part of
``settings``; ``tls`` makes credentials of them.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from services.runtime.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files."""

    cert: str = ""
    """Our certificate, and its chain."""
    key: str = ""
    """Its private key."""
    ca: str = ""
    """Who must have signed the other end's certificate."""
    name: str = ""
    """What the other end's certificate must be for; empty: the host it was reached at."""

    @property
    def is_on(self) -> bool:
        return bool(self.cert)

    def check(self, option: str) -> None:
        """
        Raises:
            InvalidArgument: something is missing or cannot be read; names the option.
        """
        if bool(self.cert) != bool(self.key):
            raise InvalidArgument(f"{option}-key", "a certificate and its key go together")
        if self.ca and not self.cert:
            raise InvalidArgument(f"{option}-cert", "is needed where certificates are checked")
        for suffix, path in (("cert", self.cert), ("key", self.key), ("ca", self.ca)):
            if path and not Path(path).is_file():
                raise InvalidArgument(f"{option}-{suffix}", f"there is no file {path}")
        if self.is_on:
            try:
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                    self.cert, self.key
                )
            except (ssl.SSLError, OSError) as error:
                reason = getattr(error, "reason", None) or error
                raise InvalidArgument(
                    f"{option}-cert", f"{self.cert} and {self.key} are no pair: {reason}"
                ) from error


NO_TLS = TlsFiles()
