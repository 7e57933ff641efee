"""What a service may answer when it cannot do what was asked, and the one table of codes.

ServiceError
├── InvalidArgument       the client's input is wrong (names the field)
├── Unauthenticated       no cluster token, or a wrong one
├── NotFound              no such model, no such thing
├── FailedPrecondition    fine in itself, but not with this cluster or this model
├── ResourceExhausted     too much at once (says when to try again)
├── Unavailable           nobody is there to do it, or who did it has gone
├── DeadlineExceeded      the client's time is over
├── Aborted               the client gave up
└── Internal              a bug of ours

Every message is one line: what is wrong, what to do. Foreign errors become one of these in
``to_service_error`` and nowhere else. Used by every service and by the command line.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine import errors as engine_errors
from kvtransfer import errors as kv_errors

if TYPE_CHECKING:
    import grpc

log = logging.getLogger(__name__)


class ServiceError(Exception):
    """Root of the services' errors."""

    @property
    def codes(self) -> Codes:
        return ERROR_CODES[type(self)]

    @property
    def grpc_code_number(self) -> int:
        """The gRPC status code as it travels in ``WorkFailed.code``."""
        return self.codes.number


class InvalidArgument(ServiceError):
    """The client's input is wrong.

    Args:
        field: the field, or option, as the client spells it; empty if there is no one field.
        reason: one line.
        code: a word that programs look for, where one is customary.
    """

    def __init__(self, field: str, reason: str, code: str | None = None) -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.field = field
        self.reason = reason
        self.code = code


class Unauthenticated(ServiceError):
    """No cluster token, or a wrong one."""


class NotFound(ServiceError):
    """There is no such thing."""


class FailedPrecondition(ServiceError):
    """Fine in itself, but not with this cluster or this model."""


class ResourceExhausted(ServiceError):
    """Too much at once.

    Args:
        reason: one line.
        retry_after_s: when it is worth trying again.
    """

    def __init__(self, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Unavailable(ServiceError):
    """Nobody is there to do it, or who did it has gone."""


class DeadlineExceeded(ServiceError):
    """The client's time is over."""


class Aborted(ServiceError):
    """The client gave up."""


class Internal(ServiceError):
    """A bug of ours."""


@dataclass(frozen=True, slots=True)
class Codes:
    """One error, three ways to say it."""

    number: int
    """The gRPC status code. A number, so that whoever only names errors does not load gRPC."""
    http: int
    label: str
    """The ``outcome`` label in metrics."""

    @property
    def grpc(self) -> grpc.StatusCode:
        import grpc

        return next(code for code in grpc.StatusCode if code.value[0] == self.number)


ERROR_CODES: Mapping[type[ServiceError], Codes] = {
    Aborted: Codes(1, 499, "abort"),
    InvalidArgument: Codes(3, 400, "invalid_argument"),
    DeadlineExceeded: Codes(4, 504, "deadline_exceeded"),
    NotFound: Codes(5, 404, "not_found"),
    ResourceExhausted: Codes(8, 429, "resource_exhausted"),
    FailedPrecondition: Codes(9, 400, "failed_precondition"),
    Internal: Codes(13, 500, "internal"),
    Unavailable: Codes(14, 503, "unavailable"),
    Unauthenticated: Codes(16, 401, "unauthenticated"),
}

_BY_NUMBER: Mapping[int, type[ServiceError]] = {
    codes.number: error for error, codes in ERROR_CODES.items()
}

_FOREIGN: tuple[tuple[type[BaseException], type[ServiceError]], ...] = (
    (engine_errors.ModelNotFound, NotFound),
    (engine_errors.ModelError, FailedPrecondition),
    (engine_errors.InvalidConfig, FailedPrecondition),
    (engine_errors.IllegalTransition, Internal),
    (kv_errors.IllegalTransition, Internal),
    (kv_errors.KvTransferError, Unavailable),
    (TimeoutError, DeadlineExceeded),
    (ConnectionError, Unavailable),
)


def from_code(code: int | grpc.StatusCode, message: str) -> ServiceError:
    """The error a peer meant by a status code. Codes we never send are Internal."""
    number = code if isinstance(code, int) else int(code.value[0])
    error = _BY_NUMBER.get(number, Internal)
    if error is InvalidArgument:
        return InvalidArgument("", message)
    return error(message)


def to_service_error(error: BaseException) -> ServiceError:
    """Any error as one of ours: the only place where foreign errors are mapped.

    What nobody expected is logged with its traceback and becomes ``Internal`` with nothing but
    its type: its text may hold parts of a prompt.
    """
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, engine_errors.InvalidRequest):
        return InvalidArgument(error.field, error.reason)
    if isinstance(error, engine_errors.CapacityError):
        return InvalidArgument("", str(error))
    if (peers := _peer_error(error)) is not None:
        return peers
    for foreign, ours in _FOREIGN:
        if isinstance(error, foreign):
            return ours(one_line(str(error)) or type(error).__name__)
    log.error("unexpected %s", type(error).__name__, exc_info=error)
    return Internal(f"internal error ({type(error).__name__}); the log of the service says where")


def _peer_error(error: BaseException) -> ServiceError | None:
    """What a peer answered through gRPC, synchronous or not; None: it is no such error."""
    if "grpc" not in sys.modules:
        return None
    import grpc

    if not isinstance(error, grpc.RpcError):
        return None
    if not isinstance(error, (grpc.aio.AioRpcError, grpc.Call)):
        return Unavailable("a peer's call ended without a status")
    code = error.code()
    return from_code(code, one_line(error.details() or code.name))


def one_line(text: str, limit: int = 500) -> str:
    """``text`` on one line, at most ``limit`` characters."""
    return " ".join(text.split())[:limit]
