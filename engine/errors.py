"""What can go wrong inside an engine.

EngineError
├── ModelError                the model cannot be served
│   ├── ModelNotFound         no such file, directory or package
│   ├── UnsupportedModel      a real model of a kind we do not run
│   └── CorruptModel          truncated or inconsistent files
├── InvalidRequest            the client's input is wrong (names the field)
├── GuideLimit                an answer that its guide can follow no further
├── CapacityError             the request can never fit this engine
├── InvalidConfig             settings that no engine can be built with
├── IllegalTransition         a bug: an event no state table allows
└── IntegrityError            a bug: blocks or sequences do not add up
"""


class EngineError(Exception):
    """Root of the engine's errors. The message is one line: what is wrong, what to do."""


class ModelError(EngineError):
    """The model cannot be served."""


class ModelNotFound(ModelError):
    """There is nothing at the given place."""


class UnsupportedModel(ModelError):
    """Readable, but of a family, quantisation or feature that is not supported."""


class CorruptModel(ModelError):
    """Truncated or inconsistent model files."""


class InvalidRequest(EngineError):
    """The client's input is wrong.

    Args:
        field: the request's field as the client spells it.
        reason: one line.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class GuideLimit(EngineError):
    """An answer that its guide can follow no further: one line of reason."""


class CapacityError(EngineError):
    """The request can never fit this engine, however long it waits."""


class IllegalTransition(EngineError):
    """An event arrived that the state table does not allow: a bug, never an input error."""


class InvalidConfig(EngineError):
    """No engine can be built with these settings. Names the setting."""


class IntegrityError(EngineError):
    """Blocks or sequences do not add up: a bug, found by a ``check_integrity``."""
