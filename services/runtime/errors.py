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

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import grpc

from engine import errors as engine_errors
from kvtransfer import errors as kv_errors

log = logging.getLogger(__name__)


class ServiceError(Exception):
    """Root of the services' errors."""

    @property
    def codes(self) -> "Codes":
        return ERROR_CODES[type(self)]

    @property
    def grpc_code_number(self) -> int:
        """The gRPC status code as it travels in ``WorkFailed.code``."""
        return int(self.codes.grpc.value[0])


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

    grpc: grpc.StatusCode
    http: int
    label: str
    """The ``outcome`` label in metrics."""


_G = grpc.StatusCode
ERROR_CODES: Mapping[type[ServiceError], Codes] = {
    InvalidArgument: Codes(_G.INVALID_ARGUMENT, 400, "invalid_argument"),
    Unauthenticated: Codes(_G.UNAUTHENTICATED, 401, "unauthenticated"),
    NotFound: Codes(_G.NOT_FOUND, 404, "not_found"),
    FailedPrecondition: Codes(_G.FAILED_PRECONDITION, 400, "failed_precondition"),
    ResourceExhausted: Codes(_G.RESOURCE_EXHAUSTED, 429, "resource_exhausted"),
    Unavailable: Codes(_G.UNAVAILABLE, 503, "unavailable"),
    DeadlineExceeded: Codes(_G.DEADLINE_EXCEEDED, 504, "deadline_exceeded"),
    Aborted: Codes(_G.CANCELLED, 499, "abort"),
    Internal: Codes(_G.INTERNAL, 500, "internal"),
}

_BY_NUMBER: Mapping[int, type[ServiceError]] = {
    codes.grpc.value[0]: error for error, codes in ERROR_CODES.items()
}

_FOREIGN: tuple[tuple[type[BaseException], type[ServiceError]], ...] = (
    (engine_errors.ModelNotFound, NotFound),
    (engine_errors.ModelError, FailedPrecondition),
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
    if isinstance(error, grpc.aio.AioRpcError):
        return from_code(error.code(), one_line(error.details() or error.code().name))
    if isinstance(error, grpc.RpcError):
        return Unavailable("a peer's call ended without a status")
    for foreign, ours in _FOREIGN:
        if isinstance(error, foreign):
            return ours(one_line(str(error)) or type(error).__name__)
    log.error("unexpected %s", type(error).__name__, exc_info=error)
    return Internal(f"internal error ({type(error).__name__}); the log of the service says where")


def one_line(text: str, limit: int = 500) -> str:
    """``text`` on one line, at most ``limit`` characters."""
    return " ".join(text.split())[:limit]
