"""Output tokens to text as it may be sent: whole characters, up to the first stop string.

Both classes hold nothing that does not follow from what was pushed, so after a handoff or a
preemption they are rebuilt from prompt and output ids. Knows nothing of requests and finish
reasons; the decode service owns one of each per request.
"""

import codecs
from collections import deque
from collections.abc import Iterable, Sequence

from engine.errors import InvalidRequest
from engine.tokenizer import Tokenizer, decode_bytes

_REPLACEMENT = "\ufffd"
_LONGEST_INCOMPLETE_BYTES = 3


class Detokenizer:
    """Text of an answer, token by token, at a cost that does not grow with its length.

    All that ``push`` and ``flush`` return, put together, is the end of
    ``decode(prompt + output)`` that output added. A character that the prompt left incomplete
    belongs to the output if the output completes it, and is dropped if it does not.

    Args:
        prompt_token_ids: only the last few are looked at.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = self._last_bytes(prompt_token_ids)
        self._at_text_start = not tail
        self._decoder.decode(tail)
        incomplete, _ = self._decoder.getstate()
        self._prompt_is_incomplete = bool(incomplete)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is certain after these tokens; never a part of a character."""
        data = decode_bytes(self._tokenizer, token_ids, self._skip_special_tokens)
        if not data:
            return ""
        if self._at_text_start:
            self._at_text_start = False
            if self._tokenizer.strips_leading_space:
                data = data.removeprefix(b" ")
        return self._own(self._decoder.decode(data))

    def flush(self) -> str:
        """What is left when no more tokens come: U+FFFD for an incomplete character."""
        return self._own(self._decoder.decode(b"", final=True))

    def _own(self, text: str) -> str:
        """Drop the mark of a character that began in the prompt and was never completed."""
        if text and self._prompt_is_incomplete:
            self._prompt_is_incomplete = False
            return text.removeprefix(_REPLACEMENT)
        return text

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        """Enough of the end of the prompt to know whether it stops inside a character."""
        data = b""
        for token_id in reversed(token_ids):
            data = decode_bytes(self._tokenizer, (token_id,), self._skip_special_tokens) + data
            if len(data) >= _LONGEST_INCOMPLETE_BYTES:
                break
        return data


class StopChecker:
    """Finds the first stop string in a stream of text, however the text is cut into pieces.

    The string that is complete first wins; of those complete at the same character, the one that
    began first, hence the longest. Each character is looked at once, whatever the number of stop
    strings (Aho and Corasick, "Efficient string matching", 1975).

    Args:
        include: the stop string itself may be sent, too.

    Raises:
        InvalidRequest: a stop string is empty.
    """

    def __init__(self, stop: tuple[str, ...], include: bool = False) -> None:
        if "" in stop:
            raise InvalidRequest("stop", "a stop string is empty")
        self._trie = _Trie(stop)
        self._include = include
        self._state = _Trie.ROOT
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text.

        Returns:
            The text that may be sent now, and the stop string if one is complete. From then on
            nothing more is sent.
        """
        if self._matched is not None:
            return "", self._matched
        trie, state = self._trie, self._state
        held, self._held = self._held + text, ""
        for end, character in enumerate(text, len(held) - len(text) + 1):
            state = trie.step(state, character)
            found = trie.longest_match[state]
            if found is not None:
                self._matched = found
                return held[: end if self._include else end - len(found)], found
        self._state = state
        certain = len(held) - trie.depth[state]
        self._held = held[certain:]
        return held[:certain], None

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        self._state = _Trie.ROOT
        return held


class _Trie:
    """All stop strings as one automaton: a state is the longest end of the text so far that
    begins some stop string."""

    ROOT = 0

    def __init__(self, words: Iterable[str]) -> None:
        # One dictionary for all states: a dictionary a state would take ten times the memory.
        self._next: dict[tuple[int, str], int] = {}
        self.depth = [0]
        self.longest_match: list[str | None] = [None]
        self._fallback = [self.ROOT]
        children = self._insert(words)
        self._link(children)

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while (following := self._next.get((state, character))) is None:
            if state == self.ROOT:
                return self.ROOT
            state = self._fallback[state]
        return following

    def _insert(self, words: Iterable[str]) -> list[list[tuple[str, int]]]:
        children: list[list[tuple[str, int]]] = [[]]
        for word in words:
            state = self.ROOT
            for character in word:
                following = self._next.get((state, character))
                if following is None:
                    following = len(self.depth)
                    self._next[state, character] = following
                    self.depth.append(self.depth[state] + 1)
                    self.longest_match.append(None)
                    self._fallback.append(self.ROOT)
                    children.append([])
                    children[state].append((character, following))
                state = following
            self.longest_match[state] = word
        return children

    def _link(self, children: list[list[tuple[str, int]]]) -> None:
        """Breadth first: a state falls back to a shallower one, whose own link is set by then."""
        queue = deque(state for _, state in children[self.ROOT])
        while queue:
            state = queue.popleft()
            if self.longest_match[state] is None:
                self.longest_match[state] = self.longest_match[self._fallback[state]]
            for character, child in children[state]:
                self._fallback[child] = self.step(self._fallback[state], character)
                queue.append(child)
