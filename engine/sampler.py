"""Choose the next token of every row from its logits.

Greedy rows take the largest logit. The others draw by the Gumbel-max rule: of the kept tokens, the
one with the largest ``logit / temperature + G(seed, position, token)``, where G is standard Gumbel
noise. The noise is a pure function (below), so a draw does not depend on the rest of the batch, on
the process or on what was drawn before; and each token has its own noise, so that a last-bit
difference in the logits changes a draw only where two tokens were tied that closely (inverting
one uniform number through the cumulative distribution would lack that).

    key     = mix64(mix64(seed + c) + position)            mod 2^64, c = 0x9E3779B97F4A7C15
    h       = fmix32((fmix32(token) ^ low32(key)) * (high32(key) | 1))
    u       = (h + 0.5) / 2^32
    G       = -log(-log(u))                                in float64

``mix64`` is the finaliser of splitmix64 (Steele, Lea, Flood 2014), ``fmix32`` that of MurmurHash3.
Where nothing is filtered, most tokens cannot win: as ``1 - u <= exp(-G)``, only those whose
``1 - u`` is below ``exp(logit / temperature - best)`` can, where ``best`` is any token's score. So
the logarithms are taken of a handful, and the result is that of the definition.
Filters apply in the order temperature, top_k, top_p, min_p, typical_p (locally typical sampling,
Meister et al. 2023), each to what those before have kept.

Knows nothing of sequences or plans. Called by the runner.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.largest import largest
from engine.request import SamplingParams

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# How many candidates top_k and top_p look at; a distribution too flat for one goes to the next,
# and in the end to the whole vocabulary.
_WIDTHS = (256, 4096)
# 2^32, and a little more than all that float32 may be off.
_SLACK = np.float32(1.001 * 2.0**32)


def sample(
    logits: Tensor, sampling: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int | None]:
    """One token a row; None where a row's logits are not finite.

    Args:
        logits: float32 ``[rows, vocab_size]``.
        sampling: of each row.
        positions: position, in its sequence, of the token that each row chooses.
    """
    # A sum is finite only if all its terms are: one pass instead of three.
    finite = logits.sum(-1).isfinite().tolist()
    best = [int(row.argmax()) for row in logits.numpy()]  # torch's takes 25 times as long
    tokens = [token if ok else None for token, ok in zip(best, finite, strict=True)]
    drawn = [row for row, ok in enumerate(finite) if ok and sampling[row].temperature > 0]
    for row, token in _draw(logits, sampling, positions, drawn):
        tokens[row] = token
    return tokens


def _draw(
    logits: Tensor, sampling: Sequence[SamplingParams], positions: Sequence[int], rows: list[int]
) -> Iterator[tuple[int, int]]:
    """(row, token) of the rows that are not greedy."""
    vocab_size = logits.shape[1]
    filtered = [r for r in rows if _is_filtered(sampling[r], vocab_size)]
    for row in sorted(set(rows) - set(filtered)):
        yield row, _draw_from_all(logits[row].numpy(), sampling[row], positions[row])
    for width in dict.fromkeys(min(width, vocab_size) for width in (*_WIDTHS, vocab_size)):
        if filtered:
            drawn = _draw_filtered(logits[filtered], sampling, positions, filtered, width)
            outcome = list(zip(filtered, drawn, strict=True))
            yield from ((row, token) for row, token in outcome if token is not None)
            filtered = [row for row, token in outcome if token is None]


def _draw_from_all(logits: npt.NDArray[np.float32], sampling: SamplingParams, position: int) -> int:
    """A token of one row, of which all are kept."""
    key = key_of(sampling.seed, position)
    likeliest = int(logits.argmax())
    top = logits[likeliest]
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32 | 1)
    h = _hashed_ids(len(logits)) ^ low
    h *= high
    _fmix32_in_place(h)
    # The score to beat: that of the likeliest token, from here on relative to its logit.
    best = _gumbel(h[likeliest : likeliest + 1])[0]
    with np.errstate(over="ignore", invalid="ignore"):  # of logits of 1e38 and the like
        bounds = (logits - top) * np.float32(1 / sampling.temperature)
        bounds -= np.float32(best)
        np.exp(bounds, out=bounds)
        bounds *= _SLACK
        np.invert(h, out=h)  # 2^32 - 1 - h
        can_win = np.union1d(np.flatnonzero(h.astype(np.float32) <= bounds), likeliest)
    scores = logits[can_win].astype(np.float64) / sampling.temperature
    scores += _gumbel(np.invert(h[can_win]))
    return int(can_win[scores.argmax()])


def _gumbel(h: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    noise: npt.NDArray[np.float64] = -np.log(-np.log((h + 0.5) * 2.0**-32))
    return noise


@lru_cache(maxsize=4)
def _hashed_ids(vocab_size: int) -> npt.NDArray[np.uint32]:
    """``fmix32`` of every token id."""
    ids = np.arange(vocab_size, dtype=np.uint32)
    _fmix32_in_place(ids)
    ids.flags.writeable = False
    return ids


def _fmix32_in_place(h: npt.NDArray[np.uint32]) -> None:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h ^= h >> np.uint32(shift)
        h *= np.uint32(factor)
    h ^= h >> np.uint32(16)


def _draw_filtered(
    logits: Tensor,
    sampling: Sequence[SamplingParams],
    positions: Sequence[int],
    rows: list[int],
    width: int,
) -> list[int | None]:
    """A token of each row's kept ones; None where more than ``width`` may have to be kept."""
    values, ids = largest(logits, width)
    kept, complete = _filter(logits, values, rows, sampling)
    if any(sampling[row].typical_p < 1 for row in rows):
        kept &= _typical(values, kept, rows, sampling)
    scores = _scaled(values, rows, sampling)
    scores += _noise(ids.to(torch.int32), rows, sampling, positions)
    winner = scores.masked_fill(~kept, float("-inf")).argmax(-1, keepdim=True)
    tokens = ids.gather(1, winner).flatten().tolist()
    return [token if done else None for token, done in zip(tokens, complete, strict=True)]


def _filter(
    logits: Tensor, values: Tensor, rows: list[int], sampling: Sequence[SamplingParams]
) -> tuple[Tensor, list[bool]]:
    """Which of the candidates top_k and top_p keep, and whether no others could be kept.

    Args:
        logits: ``[rows, vocab_size]``.
        values: ``[rows, width]``, the largest of them in descending order.
    """
    width, vocab_size = values.shape[1], logits.shape[1]
    top_k = torch.tensor([sampling[row].top_k or vocab_size for row in rows]).unsqueeze(1)
    top_p = torch.tensor([sampling[row].top_p for row in rows], dtype=torch.float64).unsqueeze(1)
    in_top_k = torch.arange(width) < top_k
    scaled = _scaled(values, rows, sampling).masked_fill(~in_top_k, float("-inf"))
    total = scaled.logsumexp(-1, keepdim=True)
    if width < vocab_size and bool((top_k > width).any()):
        over_all = _scaled(logits, rows, sampling).logsumexp(-1, keepdim=True)
        total = torch.where(top_k > width, over_all, total)
    shares = (scaled - total).exp()
    before = shares.cumsum(-1) - shares
    # top_p = 1 keeps all, whatever rounding says of the sum; the first is always kept.
    kept = in_top_k & ((before < top_p) | (top_p >= 1))
    min_p = torch.tensor([sampling[row].min_p for row in rows], dtype=torch.float64).unsqueeze(1)
    kept &= scaled >= scaled[:, :1] + min_p.log()
    kept[:, 0] = True
    # With top_k between width and the vocabulary the total above is of more than top_k tokens.
    exact = (top_k <= width) | ((top_k >= vocab_size) & ~kept[:, -1:])
    return kept, (exact.flatten() | (width == vocab_size)).tolist()


def _typical(
    values: Tensor, kept: Tensor, rows: list[int], sampling: Sequence[SamplingParams]
) -> Tensor:
    """Of the kept candidates, those whose surprise is nearest to what is expected, up to a mass."""
    typical_p = torch.tensor([sampling[r].typical_p for r in rows], dtype=torch.float64)
    scaled = _scaled(values, rows, sampling).masked_fill(~kept, float("-inf"))
    logprobs = scaled.log_softmax(-1)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs.masked_fill(~kept, 0.0)).sum(-1, keepdim=True)
    distance = (entropy + logprobs).abs().masked_fill(~kept, float("inf"))
    ordered, order = distance.sort(dim=-1, stable=True)
    mass = probabilities.gather(1, order).cumsum(-1)
    last = (mass < typical_p.unsqueeze(1)).sum(-1, keepdim=True).clamp(max=values.shape[1] - 1)
    near = distance <= ordered.gather(1, last)
    return near | (typical_p >= 1).unsqueeze(1)


def _is_filtered(sampling: SamplingParams, vocab_size: int) -> bool:
    return (
        0 < sampling.top_k < vocab_size
        or sampling.top_p < 1
        or sampling.min_p > 0
        or sampling.typical_p < 1
    )


def _scaled(logits: Tensor, rows: list[int], sampling: Sequence[SamplingParams]) -> Tensor:
    """``logits / temperature`` in float64."""
    temperature = [sampling[row].temperature for row in rows]
    return logits.double() / torch.tensor(temperature, dtype=torch.float64).unsqueeze(1)


def _noise(
    ids: Tensor, rows: list[int], sampling: Sequence[SamplingParams], positions: Sequence[int]
) -> Tensor:
    """Gumbel noise in float64 for int32 token ids ``[rows, candidates]``."""
    keys = [key_of(sampling[row].seed, positions[row]) for row in rows]
    low = torch.tensor([_as_int32(key) for key in keys], dtype=torch.int32).unsqueeze(1)
    high = torch.tensor([_as_int32(key >> 32 | 1) for key in keys], dtype=torch.int32).unsqueeze(1)
    h = _fmix32((_fmix32(ids) ^ low) * high)
    # int32 holds the same 32 bits as the unsigned number of the definition.
    unsigned = h.double() + (h < 0) * 2.0**32
    return -(-((unsigned + 0.5) * 2.0**-32).log()).log()


def key_of(seed: int, position: int) -> int:
    """The 64-bit key of one draw."""
    return _mix64(_mix64(seed + _GOLDEN) + position)


def _mix64(z: int) -> int:
    z &= _MASK64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK64
    return z ^ z >> 31


def _as_int32(value: int) -> int:
    low = value & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low


def _fmix32(h: Tensor) -> Tensor:
    """On int32, whose product wraps; its right shift copies the sign, which the mask clears."""
    h = h ^ (h >> 16 & 0xFFFF)
    h = h * _as_int32(0x85EBCA6B)
    h = h ^ (h >> 13 & 0x7FFFF)
    h = h * _as_int32(0xC2B2AE35)
    return h ^ (h >> 16 & 0xFFFF)
