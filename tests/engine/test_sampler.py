"""The draw: greedy, filtered, and random only through (seed, position)."""

import json
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sampler import key_of, sample

GREEDY = SamplingParams(temperature=0.0)
VOCAB = 500


def one(logits: torch.Tensor, sampling: SamplingParams, position: int = 0) -> int:
    (token,) = sample(logits.view(1, -1), [sampling], [position])
    assert token is not None
    return token


def draws(logits: torch.Tensor, sampling: SamplingParams, count: int) -> Counter[int]:
    """Token counts over ``count`` positions of one seed."""
    tokens = sample(logits.expand(count, -1), [sampling] * count, range(count))
    return Counter(token for token in tokens if token is not None)


# ---- the definition, written once more in plain Python ---------------------------------------


def mix64(z: int) -> int:
    mask = 2**64 - 1
    z &= mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def fmix32(h: int) -> int:
    mask = 2**32 - 1
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & mask
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & mask
    return h ^ (h >> 16)


def gumbel(seed: int, position: int, token: int) -> float:
    key = mix64(mix64(seed + 0x9E3779B97F4A7C15) + position)
    low, high = key % 2**32, key >> 32
    h = fmix32(((fmix32(token) ^ low) * (high | 1)) % 2**32)
    return -math.log(-math.log((h + 0.5) / 2**32))


@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 2**31),
    temperature=st.floats(0.05, 5.0),
    draw=st.integers(0, 1000),
)
def test_it_is_the_stated_algorithm(
    seed: int, position: int, temperature: float, draw: int
) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(draw)) * 3
    scores = [
        logit / temperature + gumbel(seed, position, token)
        for token, logit in enumerate(logits.tolist())
    ]
    expected = max(range(VOCAB), key=scores.__getitem__)
    assert one(logits, SamplingParams(temperature=temperature, seed=seed), position) == expected


def test_published_vectors() -> None:
    """Equal logits over 1,000 tokens: the token of largest noise. Never to change."""
    assert key_of(0, 0) == 0x4821_8226_FF3C_D4BF
    flat = torch.zeros(1000)
    got = [
        one(flat, SamplingParams(temperature=1.0, seed=seed), position)
        for seed, position in [(0, 0), (0, 1), (1, 0), (42, 7), (2**63, 100_000)]
    ]
    assert got == [883, 735, 732, 696, 915]


# ---- greedy ----------------------------------------------------------------------------------


def test_greedy_takes_the_largest() -> None:
    logits = torch.randn(6, VOCAB)
    assert sample(logits, [GREEDY] * 6, range(6)) == logits.argmax(-1).tolist()


def test_greedy_ignores_seed_and_filters() -> None:
    logits = torch.randn(VOCAB)
    odd = replace(GREEDY, top_k=3, top_p=0.1, seed=99)
    assert one(logits, odd, 17) == int(logits.argmax())


def test_no_rows() -> None:
    assert sample(torch.empty(0, VOCAB), [], []) == []


# ---- independence ----------------------------------------------------------------------------

MIXED = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.7, seed=6, top_k=20),
    SamplingParams(temperature=1.3, seed=7, top_p=0.9),
    SamplingParams(temperature=1.0, seed=8, top_p=0.5, top_k=400),
    SamplingParams(temperature=1.0, seed=9),
    SamplingParams(temperature=2.0, seed=10),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=5.0, seed=12, top_p=0.999),
]


@pytest.mark.parametrize("vocab", [VOCAB, 5000])
def test_a_row_does_not_depend_on_its_batch(vocab: int) -> None:
    logits = torch.randn(len(MIXED), vocab, generator=torch.Generator().manual_seed(3)) * 2
    positions = [31 * i for i in range(len(MIXED))]
    together = sample(logits, MIXED, positions)
    alone = [
        one(row, sampling, position)
        for row, sampling, position in zip(logits, MIXED, positions, strict=True)
    ]
    assert together == alone
    backwards = sample(logits.flip(0), MIXED[::-1], positions[::-1])
    assert backwards[::-1] == alone


def test_another_process_draws_the_same() -> None:
    code = (
        "import json, torch; from engine.sampler import sample;"
        "from engine.request import SamplingParams as P;"
        "print(json.dumps(sample(torch.zeros(8, 999), [P(seed=4)] * 8, range(8))))"
    )
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert json.loads(other.stdout) == sample(
        torch.zeros(8, 999), [SamplingParams(seed=4)] * 8, range(8)
    )


def test_a_last_bit_does_not_change_a_draw() -> None:
    """What makes a sampled stream survive a handoff: noise belongs to tokens, not to order."""
    logits = torch.randn(400, 5000, generator=torch.Generator().manual_seed(0))
    nudged = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)) * 1e-6
    params = [SamplingParams(seed=1)] * 400
    assert sample(logits, params, range(400)) == sample(nudged, params, range(400))


# ---- the distribution ------------------------------------------------------------------------


def chi_square(counts: Counter[int], shares: list[float], total: int) -> float:
    return sum((counts[t] - total * p) ** 2 / (total * p) for t, p in enumerate(shares) if p)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -2.0])
    shares = (logits.double() / temperature).softmax(0).tolist()
    counts = draws(logits, SamplingParams(temperature=temperature, seed=11), 20_000)
    # 7 degrees of freedom: 24.3 is the 99.9th percentile; the seed is fixed.
    assert chi_square(counts, shares, 20_000) < 24.3


def test_seeds_are_as_good_as_positions() -> None:
    params = [SamplingParams(seed=seed) for seed in range(20_000)]
    tokens = sample(torch.zeros(1, 8).expand(20_000, -1), params, [5] * 20_000)
    assert chi_square(Counter(tokens), [1 / 8] * 8, 20_000) < 24.3


def test_neighbouring_positions_are_not_correlated() -> None:
    tokens = sample(
        torch.zeros(1, 8).expand(20_001, -1), [SamplingParams(seed=3)] * 20_001, range(20_001)
    )
    pairs = Counter(a * 8 + b for a, b in pairwise(tokens))
    # 63 degrees of freedom: 103.4 is the 99.9th percentile.
    assert chi_square(pairs, [1 / 64] * 64, 20_000) < 103.4


def test_rare_tokens_come_as_often_as_they_should() -> None:
    """A tail of 4,000 tokens of 1e-5 each: 4 % in all."""
    logits = torch.full((4001,), math.log(1e-5))
    logits[0] = math.log(0.96)
    counts = draws(logits, SamplingParams(seed=2), 4000)
    assert abs(4000 - counts[0] - 160) < 4 * math.sqrt(160)


# ---- filters ---------------------------------------------------------------------------------

SHARES = [0.05, 0.4, 0.1, 0.25, 0.2]
LOGITS = torch.tensor(SHARES).log()


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (1, 1.0, {1}),
        (2, 1.0, {1, 3}),
        (5, 1.0, {0, 1, 2, 3, 4}),
        (99, 1.0, {0, 1, 2, 3, 4}),
        (0, 1e-9, {1}),
        (0, 0.39, {1}),
        (0, 0.41, {1, 3}),
        (0, 0.84, {1, 3, 4}),
        (0, 0.94, {1, 3, 4, 2}),
        # top_p is of what top_k left: 0.4 / 0.65 = 0.615.
        (2, 0.61, {1}),
        (2, 0.62, {1, 3}),
    ],
)
def test_filters_keep(top_k: int, top_p: float, kept: set[int]) -> None:
    sampling = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, seed=1)
    assert set(draws(LOGITS, sampling, 1000)) == kept


def test_kept_tokens_keep_their_proportions() -> None:
    counts = draws(LOGITS, SamplingParams(temperature=1.0, top_k=3, seed=1), 20_000)
    shares = [p / 0.85 if p >= 0.2 else 0.0 for p in SHARES]
    assert chi_square(counts, shares, 20_000) < 13.8


def test_temperature_comes_before_top_p() -> None:
    sampling = SamplingParams(temperature=0.5, top_p=0.6, seed=1)
    # Squared and normalised: 0.59 for token 1, then 0.23: the second is needed to reach 0.6.
    assert set(draws(LOGITS, sampling, 1000)) == {1, 3}
    assert set(draws(LOGITS, replace(sampling, top_p=0.58), 1000)) == {1}


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.6), (3000, 1.0), (3000, 0.6), (1024, 1.0), (4096, 1.0), (4097, 0.99)]
)
def test_flat_distributions_look_beyond_the_narrow_candidates(top_k: int, top_p: float) -> None:
    """By the definition: over 5,000 nearly equal tokens the filters keep thousands."""
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(2)) * 0.01
    order = logits.sort(descending=True).indices.tolist()[: top_k or None]
    shares = logits.double()[order].softmax(0)
    kept = order[: int(((shares.cumsum(0) - shares) < top_p).sum())]
    assert len(kept) > 256
    for position in range(20):
        best = max(kept, key=lambda t: float(logits[t]) + gumbel(6, position, t))
        sampling = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, seed=6)
        assert one(logits, sampling, position) == best


# ---- bad rows --------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", MIXED[:5], ids=str)
def test_a_row_that_is_not_finite_fails_alone(bad: float, sampling: SamplingParams) -> None:
    logits = torch.randn(3, VOCAB)
    expected = sample(logits, [sampling] * 3, range(3))
    logits[1, 77] = bad
    assert sample(logits, [sampling] * 3, range(3)) == [expected[0], None, expected[2]]


def test_extreme_but_finite_logits() -> None:
    logits = torch.tensor([3e38, -3e38, 0.0])
    for sampling in (GREEDY, SamplingParams(temperature=0.01), SamplingParams(top_p=0.5)):
        assert one(logits, sampling) == 0


# ---- min_p and typical_p, against transformers -------------------------------------------------


def kept_by(warpers: list[object], logits: torch.Tensor) -> set[int]:
    scores = logits.view(1, -1).clone()
    for warper in warpers:
        scores = warper(torch.zeros(1, 0, dtype=torch.long), scores)  # type: ignore[operator]
    return set(scores[0].isfinite().nonzero().flatten().tolist())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("typical_p", [0.2, 0.7, 1.0])
@pytest.mark.parametrize("more", [{}, {"top_k": 9}, {"top_p": 0.8}])
def test_what_min_p_and_typical_p_keep(
    seed: int, min_p: float, typical_p: float, more: dict[str, float]
) -> None:
    """Everything they keep is drawn sooner or later, and nothing else ever."""
    logits = torch.randn(60, generator=torch.Generator().manual_seed(seed)) * 1.5
    warpers: list[object] = []
    if "top_k" in more:
        warpers.append(transformers.TopKLogitsWarper(int(more["top_k"])))
    if "top_p" in more:
        warpers.append(transformers.TopPLogitsWarper(more["top_p"]))
    if min_p:
        warpers.append(transformers.MinPLogitsWarper(min_p))
    if typical_p < 1:
        warpers.append(transformers.TypicalLogitsWarper(typical_p))
    expected = kept_by(warpers, logits)
    sampling = SamplingParams(temperature=1.0, min_p=min_p, typical_p=typical_p, **more)  # type: ignore[arg-type]
    drawn = draws(logits, sampling, 3000)
    assert set(drawn) <= expected
    shares = logits.softmax(-1)
    likely = {t for t in expected if shares[t] > 0.01}
    assert likely <= set(drawn)


@pytest.mark.parametrize("width", [60, 300, 5000])
def test_flat_distributions_lose_nobody_to_a_narrow_look(width: int) -> None:
    """More candidates are kept than the sampler first looks at."""
    count = min(4 * width, 1500)
    drawn = draws(torch.zeros(width), SamplingParams(temperature=1.0, min_p=0.9), count)
    expected = width * (1 - math.exp(-count / width))  # of as many throws at so many places
    assert len(drawn) == pytest.approx(expected, rel=0.1)
    assert max(drawn) > 0.9 * width
