"""Certificates for servers and channels: who is spoken to, and that nobody listens.

Servers read changed files again, so certificates can be rotated while they serve. Knows no
service, and the files only by ``certificates``. Used by the servers and channels of every process.
"""

import ssl
from collections.abc import Mapping
from pathlib import Path

import grpc

from services.runtime.certificates import TlsFiles
from services.runtime.errors import FailedPrecondition


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials | None:
    """What a gRPC server shows; with ``ca`` it wants to see as much. None: plain text.

    Changed files count from the next connection on; unreadable ones do not count.
    """
    if not files.is_on:
        return None
    watched = _Watched(files)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        return _configuration(files) if watched.have_changed() else None

    return grpc.dynamic_ssl_server_credentials(
        _configuration(files), fetch, require_client_authentication=bool(files.ca)
    )


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials | None:
    """What a channel checks and shows. None: plain text."""
    if not (files.is_on or files.ca):
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=_read(files.ca) if files.ca else None,
        private_key=_read(files.key) if files.is_on else None,
        certificate_chain=_read(files.cert) if files.is_on else None,
    )


def channel_name(files: TlsFiles) -> tuple[tuple[str, str], ...]:
    """The channel option for ``name``."""
    return (("grpc.ssl_target_name_override", files.name),) if files.name else ()


class HttpTls:
    """The same for uvicorn, which takes an ``ssl.SSLContext``."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._watched = _Watched(files)
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.load_cert_chain(files.cert, files.key)
        if files.ca:
            self.context.load_verify_locations(files.ca)
            self.context.verify_mode = ssl.CERT_REQUIRED

    def refresh(self) -> None:
        """Read changed files; connections from now on see them."""
        if self._watched.have_changed():
            self.context.load_cert_chain(self._files.cert, self._files.key)


class _Watched:
    """When files change."""

    def __init__(self, files: TlsFiles) -> None:
        self._paths = [Path(each) for each in (files.cert, files.key, files.ca) if each]
        self._seen = self._times()

    def have_changed(self) -> bool:
        try:
            now = self._times()
        except OSError:
            return False  # in the middle of a rotation
        changed, self._seen = now != self._seen, now
        return changed

    def _times(self) -> Mapping[Path, int]:
        return {path: path.stat().st_mtime_ns for path in self._paths}


def _configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(_read(files.key), _read(files.cert))],
        root_certificates=_read(files.ca) if files.ca else None,
    )


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise FailedPrecondition(f"cannot read {path}: {error.strerror}") from error
