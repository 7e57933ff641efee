"""The error tree, its one table, and the one place where foreign errors are mapped."""

import asyncio
import re

import grpc
import pytest

from engine.errors import (
    CapacityError,
    CorruptModel,
    IllegalTransition,
    InvalidConfig,
    InvalidRequest,
)
from engine.errors import ModelNotFound as EngineModelNotFound
from kvtransfer.errors import HandoffCancelled, LinkLost
from kvtransfer.errors import IllegalTransition as KvIllegalTransition
from services.runtime import errors as e


def _all_errors() -> list[type[e.ServiceError]]:
    return e.ServiceError.__subclasses__()


def test_every_error_has_codes_of_its_own() -> None:
    assert set(_all_errors()) == set(e.ERROR_CODES)
    for column in ("number", "label"):
        values = [getattr(codes, column) for codes in e.ERROR_CODES.values()]
        assert len(set(values)) == len(values)


@pytest.mark.parametrize("error", list(e.ERROR_CODES))
def test_a_code_travels_and_comes_back(error: type[e.ServiceError]) -> None:
    code = e.ERROR_CODES[error].grpc
    for spelled in (code, code.value[0]):
        back = e.from_code(spelled, "why")
        assert type(back) is error
        assert str(back) == "why"
        assert back.grpc_code_number == code.value[0]


def test_the_numbers_are_grpcs_own() -> None:
    for error, codes in e.ERROR_CODES.items():
        name = {"Aborted": "CANCELLED"}.get(
            error.__name__, re.sub("(?<!^)([A-Z])", r"_\1", error.__name__).upper()
        )
        assert codes.grpc is grpc.StatusCode[name]


def test_a_code_we_never_send_is_internal() -> None:
    assert type(e.from_code(grpc.StatusCode.DATA_LOSS, "why")) is e.Internal
    assert type(e.from_code(99, "why")) is e.Internal


@pytest.mark.parametrize(
    ("foreign", "ours", "text"),
    [
        (InvalidRequest("top_p", "must be over 0"), e.InvalidArgument, "top_p: must be over 0"),
        (CapacityError("needs 9 blocks of 8"), e.InvalidArgument, "needs 9 blocks of 8"),
        (EngineModelNotFound("no file x"), e.NotFound, "no file x"),
        (CorruptModel("x ends early"), e.FailedPrecondition, "x ends early"),
        (InvalidConfig("block_size 5: odd"), e.FailedPrecondition, "block_size 5: odd"),
        (IllegalTransition("PICK in DONE"), e.Internal, "PICK in DONE"),
        (HandoffCancelled("given up"), e.Unavailable, "given up"),
        (LinkLost("the target is gone"), e.Unavailable, "the target is gone"),
        (KvIllegalTransition("SENT in LANDED"), e.Internal, "SENT in LANDED"),
        (TimeoutError(), e.DeadlineExceeded, "TimeoutError"),
        (ConnectionResetError("gone"), e.Unavailable, "gone"),
        (e.Aborted("left"), e.Aborted, "left"),
    ],
)
def test_foreign_errors(foreign: Exception, ours: type[e.ServiceError], text: str) -> None:
    mapped = e.to_service_error(foreign)
    assert type(mapped) is ours
    assert str(mapped) == text


def test_what_nobody_expected_tells_its_type_but_not_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mapped = e.to_service_error(ValueError("a secret prompt"))
    assert type(mapped) is e.Internal
    assert "ValueError" in str(mapped)
    assert "secret" not in str(mapped)
    assert "unexpected ValueError" in caplog.text


async def test_a_peer_that_is_not_there_is_unavailable() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        call = channel.unary_unary("/x/Y")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call(b""), 5)
    mapped = e.to_service_error(caught.value)
    assert type(mapped) is e.Unavailable
    assert "\n" not in str(mapped)
