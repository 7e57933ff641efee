"""The guides OpenAI clients ask for, under the several names that they have.

``response_format`` is OpenAI's own; ``guided_*`` and ``structured_outputs`` are vLLM's. Knows
nothing of what guides do. Used by ``openai_schemas``.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from engine.request import Guide, GuideKind
from services.runtime.errors import InvalidArgument


class Asks(Protocol):
    """A body's fields that can ask for a guide."""

    response_format: dict[str, Any] | None
    guided_json: str | dict[str, Any] | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    structured_outputs: dict[str, Any] | None


def guide_of(body: Asks) -> tuple[Guide | None, str]:
    """The guide a body asks for, and the field that does.

    Raises:
        InvalidArgument: several fields do, or one asks for what there is not.
    """
    found = [
        (guide, name)
        for name, guide in (
            ("response_format", _response_format(body.response_format)),
            ("structured_outputs", _structured(body.structured_outputs)),
            *((name, _guided(body, name, kind)) for name, kind in _GUIDED.items()),
        )
        if guide is not None
    ]
    if len(found) > 1:
        raise InvalidArgument(found[1][1], f"cannot go with {found[0][1]}")
    return found[0] if found else (None, "guided")


def _schema(value: Any, name: str) -> Guide:
    if isinstance(value, dict):
        return Guide(GuideKind.JSON_SCHEMA, json.dumps(value))
    return Guide(GuideKind.JSON_SCHEMA, _text(value, name))


def _regex(value: Any, name: str) -> Guide:
    return Guide(GuideKind.REGEX, _text(value, name))


def _grammar(value: Any, name: str) -> Guide:
    return Guide(GuideKind.GRAMMAR, _text(value, name))


def _choice(value: Any, name: str) -> Guide:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidArgument(name, "must be a list of strings")
    return Guide(GuideKind.CHOICE, choices=tuple(value))


def _object(value: Any, name: str) -> Guide:
    if value is not True:
        raise InvalidArgument(name, "must be true")
    return Guide(GuideKind.JSON_OBJECT)


Parse = Callable[[Any, str], Guide]
_STRUCTURED: Mapping[str, Parse] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _object,
}
_GUIDED: Mapping[str, Parse] = {
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
}


def _guided(body: Asks, name: str, parse: Parse) -> Guide | None:
    value = getattr(body, name)
    return None if value is None else parse(value, name)


def _structured(value: dict[str, Any] | None) -> Guide | None:
    given = {key: each for key, each in (value or {}).items() if each is not None}
    known = [key for key in given if key in _STRUCTURED]
    if len(known) != len(given) or len(given) > 1:
        raise InvalidArgument(
            "structured_outputs", f"must have one of {', '.join(_STRUCTURED)} and nothing else"
        )
    return (
        _STRUCTURED[known[0]](given[known[0]], f"structured_outputs.{known[0]}") if known else None
    )


def _response_format(value: dict[str, Any] | None) -> Guide | None:
    match (value or {"type": "text"}).get("type"):
        case "text":
            return None
        case "json_object":
            return Guide(GuideKind.JSON_OBJECT)
        case "json_schema":
            name = "response_format.json_schema"
            described = (value or {}).get("json_schema")
            if not isinstance(described, dict):
                raise InvalidArgument(name, "is missing")
            schema = described.get("schema")
            if not isinstance(schema, dict):
                raise InvalidArgument(f"{name}.schema", "must be an object")
            return _schema(schema, f"{name}.schema")
    raise InvalidArgument("response_format.type", "must be text, json_object or json_schema")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(name, "must be a string")
    return value
