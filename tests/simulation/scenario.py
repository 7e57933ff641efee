"""What happens in one run, drawn from a seed: requests, and what goes wrong at which event.

Plain data. A fault strikes after so many events of the run (a message that arrives, a step that
begins or ends), so it hits anywhere between two of them. Carried out by ``cluster``.
"""

import random
from dataclasses import dataclass, replace
from enum import StrEnum

from engine.mock_runner import TOKENS, answer
from engine.request import BeamSearch, Request, SamplingParams
from services.runtime.settings import PlacementPolicy

_EVENTS_A_REQUEST = 60
_ENDLESS = 300
"""Output tokens of a client that will not wait for them."""


class Fault(StrEnum):
    """What may go wrong at an event."""

    KILL = "kill"
    """An instance dies; another life begins ``lasts_s`` later."""
    NODE = "node"
    """An instance and the one of the other role beside it die at once, as with their machine."""
    STOP = "stop"
    """An instance stands still for so long."""
    CUT = "cut"
    """One connection of it breaks."""
    HOLD = "hold"
    """Nothing passes between it and another process for so long."""
    ROUTER = "router"
    """The router dies; the clients are told, another life begins ``lasts_s`` later."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault."""

    after_events: int
    fault: Fault
    victim: int
    """Which instance, counted around."""
    lasts_s: float


@dataclass(frozen=True, slots=True)
class Ask:
    """One client."""

    request: Request
    at_s: float
    gone_after_events: int | None = None
    """It hangs up after so many events of the run."""
    patience_s: float | None = None
    """Its deadline."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What goes wrong all the time, as shares of frames and steps."""

    mischief: float = 0.0
    damage: float = 0.0
    storm: float = 0.0
    step_failure: float = 0.0
    hiccup: float = 0.0

    @property
    def are_zero(self) -> bool:
        return self == Rates()


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run."""

    seed: int
    num_prefill: int
    num_decode: int
    policy: PlacementPolicy
    num_blocks: int
    max_decode_sequences: int
    asks: tuple[Ask, ...]
    strikes: tuple[Strike, ...]
    rates: Rates

    @property
    def is_calm(self) -> bool:
        """Nothing goes wrong: every answer must be whole."""
        return not self.strikes and self.rates.are_zero

    @property
    def must_heal(self) -> bool:
        """One instance of a role that has two fails, once, or one of each: no client may notice."""
        strikes = [each for each in self.strikes if each.fault is not Fault.HOLD]
        return (
            len(self.strikes) <= 1
            and all(each.fault is not Fault.ROUTER for each in strikes)
            and self.rates.are_zero
            and self.num_prefill > 1
            and self.num_decode > 1
        )


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    num_requests = rng.choice((1, 2, 2, 3, 4, 6))
    num_events = _EVENTS_A_REQUEST * num_requests
    num_strikes = rng.choice((0, 1, 1, 1, 2, 2, 3))
    prefixes = [_tokens(rng, rng.choice((16, 32, 40))) for _ in range(2)]
    return Scenario(
        seed=seed,
        num_prefill=rng.choice((1, 2, 2)),
        num_decode=rng.choice((1, 2, 2)),
        policy=rng.choice(list(PlacementPolicy)),
        num_blocks=rng.choice((8, 12, 24)),
        max_decode_sequences=rng.choice((2, 4, 16)),
        asks=tuple(_ask(rng, index, prefixes, num_events) for index in range(num_requests)),
        strikes=tuple(_strike(rng, num_events) for _ in range(num_strikes)),
        rates=_rates(rng),
    )


def _ask(rng: random.Random, index: int, prefixes: list[tuple[int, ...]], num_events: int) -> Ask:
    # Around the ends of blocks, where counts go wrong.
    length = rng.choice((1, 15, 16, 17, 31, 32, 33, rng.randint(1, 60)))
    prompt = _tokens(rng, length)
    if rng.random() < 0.4:
        prompt = (*rng.choice(prefixes), *prompt[: rng.choice((0, 1, 8))]) or prompt
    sampling = SamplingParams(
        temperature=rng.choice((0.0, 1.0)),
        seed=rng.randrange(1 << 32),
        max_tokens=rng.choice((1, 2, 3, 8, 17, 24)),
    )
    if rng.random() < 0.3:
        # Two letters of the answer, so that it does end there; they come one at a time.
        letters = answer(prompt, sampling.max_tokens, sampling)
        at = rng.randrange(len(letters))
        sampling = replace(sampling, stop=(bytes(letters[at : at + 2]).decode(),))
    elif rng.random() < 0.2:
        count = rng.choice((2, 3))
        sampling = replace(sampling, n=count, best_of=count)
    salt = rng.choice(("", "", "s"))
    gone_after_events = rng.randrange(num_events) if rng.random() < 0.15 else None
    if gone_after_events is not None and rng.random() < 0.5:
        sampling = replace(sampling, max_tokens=_ENDLESS)
    sampling = _ranked(sampling)
    return Ask(
        request=Request(f"q{index}", prompt, sampling, rng.choice((0, 0, 1)), salt),
        at_s=rng.choice((0.0, rng.random() * 0.05, rng.random() * 2.0)),
        gone_after_events=gone_after_events,
        patience_s=rng.uniform(0.001, 1.0) if rng.random() < 0.08 else None,
    )


def _ranked(sampling: SamplingParams) -> SamplingParams:
    """Some want the best of several answers. Its own seed says which, and no other draw moves."""
    rng = random.Random(sampling.seed)
    is_plain = not sampling.stop and sampling.n == 1 and sampling.max_tokens != _ENDLESS
    if not is_plain or rng.random() < 0.7:
        return sampling
    n = rng.choice((1, 2))
    if rng.random() < 0.5:
        return replace(sampling, n=n, best_of=3)
    search = BeamSearch(rng.choice((2, 3)), rng.choice((0.0, 1.0, 2.0)), rng.random() < 0.5)
    ends = tuple(rng.sample(TOKENS, rng.choice((0, 3, 8))))
    return replace(sampling, temperature=0.0, n=n, stop_token_ids=ends, beam_search=search)


def _strike(rng: random.Random, num_events: int) -> Strike:
    often = (Fault.KILL, Fault.STOP, Fault.CUT)
    seldom = (Fault.NODE, Fault.HOLD, *((Fault.ROUTER,) if rng.random() < 0.3 else ()))
    fault = rng.choice((*often, *often, *seldom))
    lasts_s = rng.choice((0.01, 0.2, 1.0, 4.0, 7.0)) * rng.uniform(0.5, 1.5)
    return Strike(rng.randrange(num_events), fault, rng.randrange(100), lasts_s)


def _rates(rng: random.Random) -> Rates:
    if rng.random() < 0.5:
        return Rates()
    return Rates(
        mischief=rng.choice((0.0, 0.02, 0.1)),
        damage=rng.choice((0.0, 0.0, 0.05)),
        storm=rng.choice((0.0, 0.05)),
        step_failure=rng.choice((0.0, 0.0, 0.02)),
        hiccup=rng.choice((0.0, 0.05)),
    )


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(TOKENS, k=count))
