"""A runner without a model: tokens are a function of the KV bytes it reads back. For tests.

Every row of KV (K and V, every layer) holds a checksum over its position, its token and the row
before, as it was *read from the cache*. Sampling reads all rows of the sequence through its block
table, checks each and derives the next token from the last. So KV that was lost, misplaced, half
sent or another's cannot go unseen: the sequence fails with the position named, or, where a whole
foreign but consistent sequence was put in its place, answers differently from ``next_token``.

Knows nothing of torch. Takes the place of ``engine.runner`` in tests of the loop, the services
and the cluster; ``token_s`` makes time pass as if something were computed.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from engine.beams import Candidates
from engine.config import ModelConfig
from engine.kv.manager import BlockCopy
from engine.plan import ScheduledSequence, StepPlan, StepResult
from engine.request import SamplingParams, TokenLogprobs
from kvtransfer.layout import KvLayout

Words = npt.NDArray[np.uint64]

_MASK64 = (1 << 64) - 1
_CHAIN_START = 0x6B76_7265_6C61_7921
_VALUE_TAG = 0x5555_5555_5555_5555
# What it answers with: letters, so that bytes are text and no answer ends by chance.
TOKENS = range(ord("a"), ord("z") + 1)
_ROW_WORDS = 2  # checksum, token | position << 32


class MockKvCache:
    """Block memory in plain bytes, with the same ``region`` as the real one."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        row_bytes = layout.region_bytes // (2 * layout.block_size)
        if row_bytes % (8 * _ROW_WORDS):
            raise ValueError(f"a row of {row_bytes} bytes: must be a multiple of 16")
        self.layout = layout
        self.num_blocks = num_blocks
        memory = [bytearray(num_blocks * layout.region_bytes) for _ in range(layout.num_layers)]
        self._bytes = [memoryview(buffer) for buffer in memory]
        shape = (num_blocks, 2, layout.block_size, row_bytes // 8 // _ROW_WORDS, _ROW_WORDS)
        self._words = [np.frombuffer(buffer, dtype=np.uint64).reshape(shape) for buffer in memory]

    def region(self, layer: int, block_id: int, num_blocks: int = 1) -> memoryview:
        """The writable bytes of adjacent blocks of one layer.

        Raises:
            IndexError: outside the cache.
        """
        if block_id < 0 or not 1 <= num_blocks <= self.num_blocks - block_id:
            raise IndexError(f"blocks {block_id}..{block_id + num_blocks - 1} of {self.num_blocks}")
        size = self.layout.region_bytes
        return self._bytes[layer][block_id * size : (block_id + num_blocks) * size]

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """All layers of whole blocks, one copy after the other."""
        for copy in copies:
            for layer in range(self.layout.num_layers):
                self.region(layer, copy.to_block)[:] = self.region(layer, copy.from_block)

    def write(self, layer: int, slot: int, checksum: int, content: int) -> None:
        block, offset = divmod(slot, self.layout.block_size)
        words = self._words[layer][block]
        words[0, offset] = (checksum, content)
        words[1, offset] = (checksum ^ _VALUE_TAG, content)

    def rows(self, layer: int, block_id: int) -> Words:
        """The checksums of a block's rows: ``[block_size]``."""
        return self._words[layer][block_id, 0, :, 0, 0]

    def read(self, layer: int, slots: npt.NDArray[np.int64]) -> Words:
        """``[2, slots, copies in a row, 2]``."""
        blocks, offsets = np.divmod(slots, self.layout.block_size)
        rows = self._words[layer][blocks, :, offsets]
        return rows.swapaxes(0, 1)


class MockRunner:
    """Implements ``engine.core.StepRunner`` and the attributes of ``engine.runner.Runner``."""

    def __init__(
        self,
        num_blocks: int = 256,
        block_size: int = 16,
        num_layers: int = 2,
        max_context: int = 2048,
        token_s: float = 0.0,
        vocab_size: int = 258,
        eos_token_ids: tuple[int, ...] = (257,),
    ) -> None:
        self.model_config = ModelConfig(
            family="llama",
            vocab_size=vocab_size,
            hidden_size=8,
            intermediate_size=8,
            num_layers=num_layers,
            num_heads=2,
            num_kv_heads=2,
            head_dim=4,
            max_positions=max_context,
            rope_theta=10000.0,
            rms_norm_eps=1e-5,
            tied_head=True,
            bos_token_id=256,
            eos_token_ids=eos_token_ids,
        )
        self.dtype = "float32"
        self.layout = self.model_config.kv_layout(self.dtype, block_size)
        self.num_blocks = num_blocks
        self.max_context = min(max_context, num_blocks * block_size)
        self.model_digest = hashlib.sha256(b"mock").hexdigest()
        self.cache = MockKvCache(self.layout, num_blocks)
        self._token_s = token_s

    def run(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepResult:
        """Write this plan's rows, then check and sample.

        Raises:
            ValueError: the plan writes one slot twice, or lacks a block.
        """
        layer_s = self._token_s * sum(len(s.token_ids) for s in plan.sequences)
        for layer in self.layers(plan):
            if layer_s:
                time.sleep(layer_s / self.layout.num_layers)
            if on_layer is not None:
                on_layer(layer)
        return self.sample(plan)

    def layers(self, plan: StepPlan) -> Iterator[int]:
        """Write this plan's rows, a layer at a time; yields each layer that is written.

        Raises:
            ValueError: the plan writes one slot twice, or lacks a block.
        """
        self.cache.copy_blocks(plan.copies)
        slots = [self._slots(sequence) for sequence in plan.sequences]
        self._check_writes(plan, slots)
        for layer in range(self.layout.num_layers):
            for sequence, at in zip(plan.sequences, slots, strict=True):
                self._write(layer, sequence, at)
            yield layer

    def sample(self, plan: StepPlan) -> StepResult:
        """The tokens of a plan whose rows are written, each from the rows as they are now."""
        tokens: dict[str, int] = {}
        failures: dict[str, str] = {}
        candidates: dict[str, Candidates] = {}
        logprobs: dict[str, TokenLogprobs] = {}
        for sequence in plan.sequences:
            if not sequence.samples:
                continue
            at = self._slots(sequence)
            reason = self._broken(at)
            for each in sequence.samplers:
                if reason is not None:
                    failures[each.request_id] = reason
                else:
                    last = int(self.cache.read(0, at[-1:])[0, 0, 0, 0])
                    token_id = _token(last, each.end, each.sampling)
                    tokens[each.request_id] = token_id
                    if each.sampling.num_top_logprobs is not None:
                        record = TokenLogprobs(token_id, _logprob(last, token_id), 1)
                        logprobs[each.request_id] = record
                    if (search := each.sampling.beam_search) is not None:
                        candidates[each.request_id] = _candidates(last, 2 * search.width)
        return StepResult(tokens, failures, logprobs, candidates=candidates)

    def _slots(self, sequence: ScheduledSequence) -> npt.NDArray[np.int64]:
        """Of positions 0 .. end - 1."""
        size = self.layout.block_size
        if len(sequence.block_table) * size < sequence.end:
            raise ValueError(f"{sequence.request_id}: no block for position {sequence.end - 1}")
        positions = np.arange(sequence.end)
        table = np.array(sequence.block_table, dtype=np.int64)
        return table[positions // size] * size + positions % size

    def _check_writes(self, plan: StepPlan, slots: list[npt.NDArray[np.int64]]) -> None:
        written = [at[sequence.start :] for sequence, at in zip(plan.sequences, slots, strict=True)]
        every = np.concatenate(written) if written else np.empty(0, dtype=np.int64)
        if len(np.unique(every)) != len(every):
            raise ValueError(f"step {plan.step} writes a slot twice")

    def _write(self, layer: int, sequence: ScheduledSequence, at: npt.NDArray[np.int64]) -> None:
        before = _CHAIN_START
        if sequence.start:
            one = at[sequence.start - 1 : sequence.start]
            before = int(self.cache.read(layer, one)[0, 0, 0, 0])
        for position, token_id in enumerate(sequence.token_ids, sequence.start):
            content = token_id | position << 32
            before = _checksum(layer, content, before)
            self.cache.write(layer, int(at[position]), before, content)

    def _broken(self, at: npt.NDArray[np.int64]) -> str | None:
        """The first row that is not what was written for this sequence."""
        for layer in range(self.layout.num_layers):
            keys, values = self.cache.read(layer, at)
            checksums, contents = keys[:, 0, 0], keys[:, 0, 1]
            before = np.concatenate((np.array([_CHAIN_START], dtype=np.uint64), checksums[:-1]))
            tag = np.uint64(layer + 1)
            right = _mix_all(before ^ _mix_all(contents ^ _mix_all(tag + np.zeros_like(before))))
            intact = (
                (right == checksums)
                & (contents >> np.uint64(32) == np.arange(len(at), dtype=np.uint64))
                & (keys == keys[:, :1]).all((1, 2))
                & (values[..., 0] == (checksums ^ np.uint64(_VALUE_TAG))[:, None]).all(1)
                & (values[..., 1] == contents[:, None]).all(1)
            )
            if not intact.all():
                position = int(intact.argmin())
                return f"KV of layer {layer} at position {position} is not what was written"
        return None


def row_checksums(layer: int, token_ids: Sequence[int]) -> list[int]:
    """What the cache holds for these tokens in one layer, a row each."""
    checksums, before = [], _CHAIN_START
    for position, token_id in enumerate(token_ids):
        before = _checksum(layer, token_id | position << 32, before)
        checksums.append(before)
    return checksums


def next_token(token_ids: Sequence[int], sampling: SamplingParams | None = None) -> int:
    """What ``MockRunner`` answers to this prompt + output, if no KV went astray."""
    checksum = row_checksums(0, token_ids)[-1]
    return _token(checksum, len(token_ids), sampling or SamplingParams(temperature=0.0))


def next_candidates(token_ids: Sequence[int], width: int) -> Candidates:
    """What it gives a beam of a search of this width to go on with."""
    return _candidates(row_checksums(0, token_ids)[-1], 2 * width)


def mean_logprob(prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> float:
    """What an answer is ranked by."""
    checksums = row_checksums(0, (*prompt_token_ids, *output_token_ids))
    before = checksums[len(prompt_token_ids) - 1 :]
    total = sum(_logprob(c, t) for c, t in zip(before, output_token_ids, strict=False))
    return total / len(output_token_ids)


def answer(
    prompt_token_ids: Sequence[int], num_tokens: int, sampling: SamplingParams | None = None
) -> list[int]:
    """The first ``num_tokens`` output tokens of an undisturbed run."""
    sampling = sampling or SamplingParams(temperature=0.0)
    before = row_checksums(0, prompt_token_ids)[-1]
    token_ids: list[int] = []
    for position in range(len(prompt_token_ids), len(prompt_token_ids) + num_tokens):
        token_ids.append(_token(before, position, sampling))
        before = _checksum(0, token_ids[-1] | position << 32, before)
    return token_ids


def _token(checksum: int, position: int, sampling: SamplingParams) -> int:
    if sampling.temperature > 0:
        checksum ^= _mix(_mix(sampling.seed + 1) + position)
    return TOKENS[_mix(checksum) % len(TOKENS)]


def _logprob(checksum: int, token_id: int) -> float:
    """A number that float32 holds exactly."""
    return -1 - _mix(checksum + token_id) % 1024 / 256


def _candidates(checksum: int, count: int) -> Candidates:
    """Different tokens, at most as many as there are: first that of a greedy answer."""
    first, step = _mix(checksum) % len(TOKENS), 1 + _mix(checksum + 1) % 1000 / 1000
    places = range(min(count, len(TOKENS)))
    return tuple((TOKENS[(first + 7 * k) % len(TOKENS)], -step * (k + 1)) for k in places)


def _checksum(layer: int, content: int, before: int) -> int:
    return _mix(before ^ _mix(content ^ _mix(layer + 1)))


def _mix(z: int) -> int:
    """The finaliser of splitmix64."""
    z &= _MASK64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK64
    return z ^ z >> 31


def _mix_all(z: Words) -> Words:
    """``_mix`` of each word; the product of unsigned arrays wraps."""
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)
