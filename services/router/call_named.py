"""One tool call as newer Mistral models write it, ``name[ARGS]{…}``, read character by character.

The object is the arguments, and is passed on as it comes. Used by ``call_reader``.
"""

import string

from services.router.call_object import NoCallError
from services.router.json_nesting import JsonNesting

MAX_HEAD_CHARACTERS = 256
"""Of a name, an id and their markers."""
_NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_-.:/")
_BLANKS = " \t\r\n"


class NamedCall:
    """From the first character of its name on.

    Args:
        args: the marker between name and arguments.
        call_id: one that may stand between them with an id of the model's own, which is dropped.
    """

    def __init__(self, args: str, call_id: str) -> None:
        self.name: str | None = None
        self.is_over = False
        self._args = args
        self._call_id = call_id
        self._head = ""
        self._nesting = JsonNesting()

    def take(self, character: str) -> str:
        """The piece of the arguments that is new with ``character``.

        Raises:
            NoCallError: it does not fit; it has not been taken.
        """
        if self.name is None:
            self._read_head(character)
            return ""
        if self._nesting.depth == 0:
            if character in _BLANKS:
                return ""
            if character != "{":
                raise NoCallError
        self._nesting.take(character)
        self.is_over = self._nesting.depth == 0
        return character

    def _read_head(self, character: str) -> None:
        head = self._head + character
        if len(head) > MAX_HEAD_CHARACTERS or not self._may_be_head(head):
            raise NoCallError
        self._head = head
        if head.endswith(self._args):
            self.name = head.removesuffix(self._args).partition(self._call_id)[0]

    def _may_be_head(self, head: str) -> bool:
        """A name, then perhaps an id, then the marker, as far as they have come."""
        name, bracket, rest = head.partition("[")
        if not name or not _NAME_CHARACTERS.issuperset(name):
            return False
        rest = bracket + rest
        if rest.startswith(self._call_id):
            _, bracket, rest = rest.removeprefix(self._call_id).partition("[")
            rest = bracket + rest
        elif self._call_id.startswith(rest):
            return True
        return self._args.startswith(rest)
