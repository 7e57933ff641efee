"""Tool calls out of an answer's text, piece by piece as it comes.

    text     look for the marker that begins calls; without markers, for JSON at the beginning
    between  after the marker or a call: separators, another call, the end marker, or text again
    call     one JSON object: first its name, then its arguments as they come (``call_object``);
             or the name, a marker and the arguments (``call_named``)

What turns out to be no call is text again, to the letter. The result does not depend on where the
text is cut. Knows no model, only a ``CallSpelling``. Used by ``openai_answers``.
"""

from collections.abc import Collection
from dataclasses import dataclass

from services.router.call_named import NamedCall
from services.router.call_object import CallObject, NoCallError

_BLANKS = " \t\r\n"
_SEPARATORS = _BLANKS + "[],;"


@dataclass(frozen=True, slots=True)
class CallSpelling:
    """What stands around a model's calls ``{"name": …, "arguments": {…}}`` or ``name[ARGS]{…}``."""

    begin: str = ""
    """Before calls; empty: an answer that calls begins with them."""
    end: str = ""
    """After each call; a model may leave it out."""
    ignored: str = ""
    """May stand before calls that have no ``begin``."""
    args: str = ""
    """Between name and arguments; empty: a call is one object. Needs ``begin``."""
    call_id: str = ""
    """With ``args``: may stand after the name, before an id."""


@dataclass(frozen=True, slots=True)
class Text:
    """Of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The next call, by its name."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments: together, JSON as the model wrote it."""

    index: int
    text: str


Part = Text | CallBegins | Arguments


class CallReader:
    """Reads one answer.

    Args:
        names: of the tools; where there is no marker, only these make JSON a call.
        most_calls: further ones are dropped.
    """

    def __init__(
        self, spelling: CallSpelling, names: Collection[str], most_calls: int | None = None
    ) -> None:
        self._spelling = spelling
        self._names = None if spelling.begin else names
        self._most_calls = most_calls
        self._begun = 0
        self._may_begin = not spelling.begin
        self._in_calls = False
        self._call: CallObject | NamedCall | None = None
        # Brackets begin markers where they do not stand around calls.
        self._separators = _BLANKS if spelling.args else _SEPARATORS
        # Read, but not yet known to be text or not: what led here, and what followed.
        self._marker, self._held = "", ""
        self._parts: list[Part] = []

    @property
    def num_calls(self) -> int:
        """Calls that have begun, without those that are dropped."""
        return self._begun if self._most_calls is None else min(self._begun, self._most_calls)

    def push(self, text: str) -> list[Part]:
        """What is new with the next piece of the answer."""
        for character in text:
            self._take(character)
        return self._new_parts()

    def end(self) -> list[Part]:
        """What is left when the answer has ended."""
        cut_short = self._call is not None and self._call.name is not None
        leftover = self._marker + self._held
        blank = self._separators if self._in_calls else _BLANKS
        if not cut_short and (leftover.strip(blank) or not self._begun):
            self._give_back()
        self._marker = self._held = ""
        self._call = None
        return self._new_parts()

    def _take(self, character: str) -> None:
        if self._call is not None:
            self._in_call(self._call, character)
        elif self._in_calls:
            self._between(character)
        elif self._spelling.begin:
            self._seek_marker(self._spelling.begin, character)
        elif self._may_begin:
            self._seek_beginning(character)
        else:
            self._parts.append(Text(character))

    def _seek_marker(self, begin: str, character: str) -> None:
        held = self._held + character
        if held.endswith(begin):
            known = held[: -len(begin)].rstrip(_BLANKS)
            self._parts.append(Text(known))
            self._marker, self._held, self._in_calls = held[len(known) :], "", True
            return
        # Blanks before a call belong to nothing, so they wait too.
        tail = next(n for n in range(len(begin) - 1, -1, -1) if held.endswith(begin[:n]))
        known = held[: len(held) - tail].rstrip(_BLANKS)
        self._parts.append(Text(known))
        self._held = held[len(known) :]

    def _seek_beginning(self, character: str) -> None:
        said = (self._held + character).lstrip(_BLANKS)
        ignored = self._spelling.ignored
        if not said or (ignored and ignored.startswith(said)):
            self._held += character
        elif said.removeprefix(ignored).lstrip(_BLANKS) in ("", "{", "["):
            if character in "{[":
                self._marker, self._held = self._held, ""
                self._may_begin, self._in_calls = False, True
                self._between(character)
            else:
                self._held += character
        else:
            self._may_begin = False
            self._give_back()
            self._take(character)

    def _between(self, character: str) -> None:
        said = self._held.lstrip(self._separators) + character
        begin, end = self._spelling.begin, self._spelling.end
        if (end and end.startswith(said)) or (begin and begin.startswith(said)):
            self._held += character
            if said == end:
                if self._marker:  # nothing was called: all of it is text
                    self._give_back()
                self._held, self._in_calls = "", False
            elif said == begin:
                self._marker, self._held = self._marker + self._held, ""
        elif said != character:  # a marker that was none
            self._leave_calls(character)
        elif character in self._separators:
            self._held += character
        elif self._spelling.args:
            self._call = NamedCall(self._spelling.args, self._spelling.call_id)
            self._in_call(self._call, character)
        elif character == "{":
            self._held += character
            self._call = CallObject(self._names)
        else:
            self._leave_calls(character)

    def _in_call(self, call: CallObject | NamedCall, character: str) -> None:
        known = call.name
        try:
            piece = call.take(character)
        except NoCallError:
            self._call = None
            if known is None:
                self._leave_calls(character)
            else:
                self._between(character)
            return
        self._held += character
        if call.name is not None:
            self._marker = self._held = ""
            if known is None:
                self._parts.append(CallBegins(self._begun, call.name))
                self._begun += 1
            self._parts.append(Arguments(self._begun - 1, piece))
        if call.is_over:
            self._call = None

    def _leave_calls(self, character: str) -> None:
        self._in_calls = False
        self._give_back()
        self._take(character)

    def _give_back(self) -> None:
        self._parts.append(Text(self._marker + self._held))
        self._marker = self._held = ""

    def _new_parts(self) -> list[Part]:
        parts, self._parts = self._parts, []
        joined: list[Part] = []
        for part in parts:
            last = joined[-1] if joined else None
            match part:
                case Text("") | Arguments(text=""):
                    continue
                case CallBegins(index) | Arguments(index) if index >= self.num_calls:
                    continue
                case Text(text) if isinstance(last, Text):
                    joined[-1] = Text(last.text + text)
                case Arguments(index, text) if isinstance(last, Arguments) and last.index == index:
                    joined[-1] = Arguments(index, last.text + text)
                case _:
                    joined.append(part)
        return joined
