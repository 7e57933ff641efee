"""A config arrives as it left."""

import json

import pytest

from engine.config import EngineConfig
from services.launch.transfer import Config, read_config, write_config
from services.runtime.settings import Role, RouterConfig, WorkerConfig

CONFIGS: list[Config] = [
    RouterConfig(model="demo", host="::1", grpc_port=0, insecure=True, drain_timeout_s=0.5),
    WorkerConfig(
        model="a path with spaces\nand a line",
        role=Role.DECODE,
        router="127.0.0.1:1",
        engine=EngineConfig(threads=3, prefix_cache=False, max_step_s=0.1),
    ),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_round_trip(config: Config) -> None:
    line = write_config(config)
    assert "\n" not in line
    assert read_config(line) == config


def test_types_are_restored() -> None:
    config = read_config(write_config(CONFIGS[1]))
    assert isinstance(config, WorkerConfig)
    assert isinstance(config.role, Role)
    assert isinstance(config.engine, EngineConfig)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        '{"service": "router"}',
        '{"service": "bank", "config": {}}',
        json.dumps({"service": "router", "config": {"model": "demo", "colour": "red"}}),
        json.dumps({"service": "worker", "config": {"model": "demo", "role": "king"}}),
    ],
)
def test_anything_else_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        read_config(line)
