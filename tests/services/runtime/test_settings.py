"""Config dataclasses: every field explains itself, every bad value names its option."""

import dataclasses

import pytest

from engine.config import EngineConfig
from services.runtime.errors import InvalidArgument, NotFound
from services.runtime.settings import (
    Role,
    RouterConfig,
    WorkerConfig,
    field_default,
    field_help,
)


@pytest.mark.parametrize("cls", [RouterConfig, WorkerConfig, EngineConfig])
def test_every_field_has_help(cls: type) -> None:
    for field in dataclasses.fields(cls):
        text = field_help(cls, field.name)
        assert text.endswith(".") and "\n" not in text


def test_help_and_default_of_one_field() -> None:
    assert field_help(RouterConfig, "grpc_port") == "Public gRPC port; 0: any free one."
    assert field_default(RouterConfig, "grpc_port") == 50051
    with pytest.raises(NotFound, match="no docstring"):
        field_help(RouterConfig, "colour")
    with pytest.raises(NotFound, match="no default"):
        field_default(RouterConfig, "model")


def test_good_configs_pass() -> None:
    RouterConfig("demo").validate()
    RouterConfig("demo", grpc_port=0, http_port=0, internal_port=0).validate()
    RouterConfig("demo", host="0.0.0.0", insecure=True).validate()
    WorkerConfig("demo", Role.DECODE, "127.0.0.1:50052").validate()


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"model": " "}, "MODEL"),
        ({"grpc_port": -1}, "--grpc-port"),
        ({"http_port": 65536}, "--http-port"),
        ({"http_port": 50051}, "--grpc-port"),
        ({"disaggregate_from": -1}, "--disaggregate-from"),
        ({"placement": "best"}, "--placement"),
        ({"max_requests": 0}, "--max-requests"),
        ({"drain_timeout_s": float("nan")}, "--drain-timeout-s"),
        ({"host": "0.0.0.0"}, "--host"),
        ({"internal_host": "10.0.0.7"}, "--host"),
    ],
)
def test_bad_router_config_names_the_option(change: dict[str, object], option: str) -> None:
    config = dataclasses.replace(RouterConfig("demo"), **change)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument) as caught:
        config.validate()
    assert caught.value.field == option


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"router": "nowhere"}, "--router"),
        ({"router": "host:0"}, "--router"),
        ({"port": 70000}, "--port"),
        ({"transport": "pigeon"}, "--transport"),
        ({"transport_throttle": -1}, "--transport-throttle"),
        ({"transport_latency_ms": -1.0}, "--transport-latency-ms"),
        ({"engine": EngineConfig(dtype="int3")}, "--dtype"),
        ({"engine": EngineConfig(device="tpu")}, "--device"),
        ({"engine": EngineConfig(block_size=0)}, "--block-size"),
        ({"engine": EngineConfig(threads=0)}, "--threads"),
        ({"engine": EngineConfig(schedule="fair")}, "--schedule"),
        ({"engine": EngineConfig(deterministic=True, kernels="torch")}, "--deterministic"),
        ({"engine": EngineConfig(max_prefill_batch=0)}, "--max-prefill-batch"),
        ({"engine": EngineConfig(max_decode_sequences=0)}, "--max-decode-sequences"),
        (
            {"engine": EngineConfig(max_consecutive_prefill_steps=0)},
            "--max-consecutive-prefill-steps",
        ),
        ({"engine": EngineConfig(token_budget=79)}, "--token-budget"),
        ({"engine": EngineConfig(max_step_s=0)}, "--max-step-s"),
    ],
)
def test_bad_worker_config_names_the_option(change: dict[str, object], option: str) -> None:
    config = WorkerConfig("demo", Role.PREFILL, "127.0.0.1:50052")
    with pytest.raises(InvalidArgument) as caught:
        dataclasses.replace(config, **change).validate()  # type: ignore[arg-type]
    assert caught.value.field == option


def test_roles_travel_as_numbers() -> None:
    assert [Role.from_number(role.number) for role in Role] == list(Role)
    with pytest.raises(InvalidArgument, match="role"):
        Role.from_number(0)
