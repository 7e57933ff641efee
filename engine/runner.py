"""Runs one plan at a time: rows to tensors, forward, sample. One per engine.

Settles what ``auto`` means on this machine and makes the KV cache. Knows nothing of requests,
schedules or handoffs. Built by the worker; called on the engine's step thread.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from engine.choice import choose_tokens
from engine.config import EngineConfig, ModelConfig
from engine.errors import CapacityError, ModelError
from engine.guide import Guides
from engine.kv.cache import PagedKvCache, num_blocks_for
from engine.loaders.files import ModelFiles
from engine.models.choose import Weights, build, choose, read_weights
from engine.plan import StepPlan, StepResult
from engine.prompt_rows import PromptRows
from engine.recipe import Recipe
from engine.tokenizer import Tokenizer
from kvtransfer.layout import KvLayout

MOST_AUTO_KV_BYTES = 1 << 30


class Runner:
    """The model and its KV cache.

    Args:
        weights: of ``files``, in memory already; None: read them.
        tokenizer: the same.

    Raises:
        ModelError: the model cannot be computed as asked.
        CapacityError: the KV cache is too small for one block, or for ``max_context``.
    """

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        weights: Weights | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        device = resolve_device(config.device)
        choice = choose(config, files)
        self.model_config = model = files.config.stretched(config.max_context)
        self.recipe = choice.recipe
        self.layout = choice.layout
        kv_cache_bytes = config.kv_cache_bytes or default_kv_cache_bytes()
        self.num_blocks = num_blocks_for(kv_cache_bytes, self.layout)
        self.max_context = resolve_max_context(config, files.config, self.num_blocks)
        identity = files.identity
        if model is not files.config:
            identity += f", stretched to {model.max_positions}"
        self.model_digest = model_digest(identity, self.recipe, self.layout)
        self.cache = PagedKvCache(self.layout, self.num_blocks, device)
        self._threads = config.threads
        self._files, self._tokenizer = files, tokenizer
        self._guides: Guides | None = None
        torch.set_num_threads(config.threads)
        weights = weights or read_weights(config, files)
        self._model = build(weights, model, config.threads, self.max_context)

    def run(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepResult:
        """One forward over the plan's sequences (at least one)."""
        # OpenMP keeps the number of threads per calling thread.
        torch.set_num_threads(self._threads)
        rows = [sequence for sequence in plan.sequences if sequence.samples]
        sampling = [each for row in rows for each in row.samplers]
        self.cache.copy_blocks(plan.copies)
        with torch.inference_mode():
            prompts = PromptRows(plan.sequences)
            logits = self._model.step(plan.sequences, self.cache, on_layer, prompts.wanted)
            if len(sampling) > len(rows):
                logits = logits.repeat_interleave(torch.tensor([len(r.samplers) for r in rows]), 0)
            eos_token_ids = self.model_config.eos_token_ids
            result = choose_tokens(logits, sampling, eos_token_ids, self._make_guides)
            return replace(result, prompt_logprobs=prompts.told())

    def _make_guides(self) -> Guides:
        """Made for the first request that wants a guide."""
        if self._guides is None:
            tokenizer = self._tokenizer or self._files.tokenizer()
            self._guides = Guides(tokenizer, self.model_config.vocab_size)
        return self._guides


def resolve_device(device: str) -> str:
    """``auto`` is the CPU.

    Raises:
        ModelError: not a device of this build.
    """
    if device in ("auto", "cpu"):
        return "cpu"
    if device == "cuda":
        raise ModelError("device cuda: this build computes on the CPU only; use --device cpu")
    raise ModelError(f"device {device}: unknown; use auto or cpu")


def default_kv_cache_bytes() -> int:
    """An eighth of the memory this process may use, at most 1 GiB."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        memory = min(memory, int(text))
    return min(MOST_AUTO_KV_BYTES, memory // 8)


def resolve_max_context(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    """The longest prompt + answer: as asked, or all that the model and the KV cache allow.

    Raises:
        CapacityError: more is asked than either allows.
    """
    held = num_blocks * config.block_size
    if config.max_context == 0:
        return min(model.max_positions, held)
    if config.max_context > model.longest_context:
        raise CapacityError(
            f"max_context {config.max_context}: the model was trained for {model.longest_context} "
            "tokens; use --max-context up to that"
        )
    if config.max_context > held:
        raise CapacityError(
            f"max_context {config.max_context}: the KV cache holds {held} tokens; "
            "raise --kv-cache-bytes or lower --max-context"
        )
    return config.max_context


def model_digest(identity: str, numbers: Recipe, layout: KvLayout) -> str:
    """sha256 over the files and the numeric recipe: what must agree for KV to mean the same.

    Block size and order are not part of it: KV can be repacked, values cannot be recomputed.
    """
    recipe = asdict(layout) | {"files": identity, **asdict(numbers)}
    del recipe["block_size"], recipe["order"]
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
