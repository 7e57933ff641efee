"""What a client already has of several answers, when another attempt writes them from the start.

An answer is a pure function of its request, so another attempt says the same again, event by
event. One answer goes on after the tokens that are out; several, each at its own place, begin
anew, and what was said before is not passed on again. Where arithmetic differs between instances
another attempt may say something else: then the request fails, as two halves of different answers
are no answer. Pure. Used by ``attempts``.
"""

from collections import Counter, defaultdict

from protos import inference_pb2 as public
from services.runtime.errors import Unavailable

Output = public.Tokens | public.ChoiceFinished


class Replay:
    """Events by answer, over all attempts at one request."""

    def __init__(self) -> None:
        self._told: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        self._heard: Counter[int] = Counter()

    def restart(self) -> None:
        """Another attempt begins."""
        self._heard.clear()

    def is_new(self, event: Output) -> bool:
        """Whether the client has not had this event yet; from now on it has.

        Raises:
            Unavailable: it had another one in this place.
        """
        said = tuple(event.token_ids) if isinstance(event, public.Tokens) else ()
        told = self._told[event.index]
        place = self._heard[event.index]
        self._heard[event.index] += 1
        if place < len(told):
            if told[place] != said:
                raise Unavailable(
                    "an instance failed, and another one writes these answers differently: "
                    "ask again"
                )
            return False
        told.append(said)
        return True
