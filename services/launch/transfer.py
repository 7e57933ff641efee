"""A config on its way into another process: one line of JSON, read back into the same dataclass.

Not the command line: a config goes over whole, and nothing secret shows in a list of processes.
Not pickle: what is read can only be a config. Written by ``processes`` and ``actors``, read by
``child`` and by the actor.
"""

import dataclasses
import enum
import json
import types
import typing
from typing import Any

from services.runtime.settings import RouterConfig, WorkerConfig

Config = RouterConfig | WorkerConfig
KINDS: dict[str, type[Config]] = {"router": RouterConfig, "worker": WorkerConfig}


def write_config(config: Config) -> str:
    """One line, without its end."""
    service = next(name for name, kind in KINDS.items() if isinstance(config, kind))
    return json.dumps({"service": service, "config": dataclasses.asdict(config)})


def read_config(line: str) -> Config:
    """The inverse of ``write_config``.

    Raises:
        ValueError: not such a line.
    """
    try:
        fields = json.loads(line)
        config: Config = _restore(KINDS[fields["service"]], fields["config"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a config: {error!r}") from error
    return config


def _restore(kind: Any, value: Any) -> Any:
    """``value``, as JSON has it, as the annotated type ``kind``."""
    if isinstance(kind, types.UnionType):
        arms = typing.get_args(kind)
        kind = next(arm for arm in arms if (arm is types.NoneType) == (value is None))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _restore(hints[name], item) for name, item in value.items()})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if typing.get_origin(kind) is tuple:
        return tuple(_restore(typing.get_args(kind)[0], item) for item in value)
    return value
