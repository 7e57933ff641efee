"""One tool call as a model writes it, a JSON object, read character by character.

Finds the name and passes the arguments on as they come; what is inside them is the model's matter,
so values are only followed to where they end. Used by ``call_reader``.
"""

import json
from collections.abc import Collection
from enum import Enum, auto
from typing import Any

from services.router.json_nesting import JsonNesting

NAME_KEY = "name"
ARGUMENT_KEYS = ("arguments", "parameters")
_BLANKS = " \t\r\n"


class NoCallError(Exception):
    """What was read is not a call, or no longer one."""


class _At(Enum):
    NEXT_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE_BEGINS = auto()
    VALUE = auto()
    OVER = auto()


class CallObject:
    """From the character after its opening brace on.

    Args:
        names: that a call may have; None: any.
    """

    def __init__(self, names: Collection[str] | None) -> None:
        self.name: str | None = None
        self._names = names
        self._at = _At.NEXT_KEY
        self._key = ""
        self._token = ""  # the key or the value so far
        self._nesting = JsonNesting()  # in the key or the value
        self._has_arguments = self._streams = False
        self._early = ""  # arguments that came before the name

    @property
    def is_over(self) -> bool:
        """The closing brace was read."""
        return self._at is _At.OVER

    def take(self, character: str) -> str:
        """The piece of the arguments that is new with ``character``.

        Raises:
            NoCallError: it does not fit; it has not been taken.
        """
        match self._at:
            case _At.KEY:
                self._read_key(character)
            case _At.VALUE:
                return self._read_value(character)
            case _ if character in _BLANKS:
                pass
            case _At.NEXT_KEY:
                return self._next_key(character)
            case _At.COLON if character == ":":
                self._at = _At.VALUE_BEGINS
            case _At.VALUE_BEGINS if character not in ",:}]":
                return self._begin_value(character)
            case _:
                raise NoCallError
        return ""

    def _next_key(self, character: str) -> str:
        if character == '"':
            self._at, self._token = _At.KEY, character
            self._nesting = JsonNesting()
            self._nesting.take(character)
        elif character == "}":
            if self.name is None:
                raise NoCallError
            self._at = _At.OVER
            return "" if self._has_arguments else "{}"
        elif character != ",":
            raise NoCallError
        return ""

    def _read_key(self, character: str) -> None:
        self._nesting.take(character)
        self._token += character
        if not self._nesting.in_string:
            self._key = str(_value(self._token))
            self._at = _At.COLON

    def _begin_value(self, character: str) -> str:
        self._at, self._token, self._nesting = _At.VALUE, "", JsonNesting()
        is_arguments = self._key in ARGUMENT_KEYS and not self._has_arguments
        self._streams = is_arguments and character in "{["
        return self._read_value(character)

    def _read_value(self, character: str) -> str:
        if not self._nesting.in_string and self._nesting.depth == 0 and self._token:
            if character not in ",}" and character not in _BLANKS:
                self._token += character  # of a number or a word
                return ""
            piece = self._value_ended()
            self._at = _At.NEXT_KEY
            return piece + self.take(character)
        self._nesting.take(character)
        self._token = character if self._streams else self._token + character
        piece = self._told(character) if self._streams else ""
        if self._nesting.in_string or self._nesting.depth > 0 or character not in '"}]':
            return piece
        piece += self._value_ended()
        self._at = _At.NEXT_KEY
        return piece

    def _value_ended(self) -> str:
        if self._key == NAME_KEY and self.name is None:
            name = _value(self._token)
            if not isinstance(name, str) or (self._names is not None and name not in self._names):
                raise NoCallError
            self.name = name
            early, self._early = self._early, ""
            return early
        if self._key in ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            if not self._streams:
                value = _value(self._token)
                # Some models write the arguments' JSON as a string, as OpenAI's API does.
                written = value if isinstance(value, str) else self._token
                return self._told("{}" if value is None else written)
        return ""

    def _told(self, piece: str) -> str:
        if self.name is not None:
            return piece
        self._early += piece
        return ""


def _value(token: str) -> Any:
    try:
        return json.loads(token, strict=False)
    except ValueError:
        raise NoCallError from None
