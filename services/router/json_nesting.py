"""Where in JSON text one is, character by character: how deep, and whether in a string.

Knows nothing of keys or values. Used by ``call_object`` and ``call_named``.
"""


class JsonNesting:
    """Strings and brackets so far."""

    def __init__(self) -> None:
        self.depth = 0
        """Open objects and lists."""
        self.in_string = False
        self._is_escaped = False

    def take(self, character: str) -> None:
        """One more character."""
        if self._is_escaped:
            self._is_escaped = False
        elif self.in_string and character == "\\":
            self._is_escaped = True
        elif character == '"':
            self.in_string = not self.in_string
        elif not self.in_string:
            self.depth += (character in "{[") - (character in "}]")
