"""What a client already has of several answers, when another attempt writes them from the start.

An answer is a pure function of its request, so another attempt says the same again, event by
event. One answer goes on after the tokens that are out; several, each at its own place, begin
anew, and what was said before is not passed on again. Pure. Used by ``attempts``.
"""

from collections import Counter

from protos import inference_pb2 as public

Output = public.Tokens | public.ChoiceFinished


class Replay:
    """Counts events by answer, over all attempts at one request."""

    def __init__(self) -> None:
        self._told: Counter[int] = Counter()
        self._heard: Counter[int] = Counter()

    def restart(self) -> None:
        """Another attempt begins."""
        self._heard.clear()

    def is_new(self, event: Output) -> bool:
        """Whether the client has not had this event yet; from now on it has."""
        self._heard[event.index] += 1
        if self._heard[event.index] <= self._told[event.index]:
            return False
        self._told[event.index] += 1
        return True
