"""A native step around its numbers: layer by layer, announced, refused, and on a busy machine."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.config import ModelConfig
from engine.errors import UnsupportedModel
from engine.kv.cache import PagedKvCache
from engine.loaders.files import ModelFiles
from engine.loaders.open import open_model
from engine.models.on_native import FileWeights
from engine.ops.cpu.native_model import NativeLlama, NativeStep, SequenceRows
from engine.ops.cpu.weights import PackedWeights, check_shapes
from kvtransfer.layout import KvLayout
from tests.tiny_model import LAYERS, make_tiny_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 30
TABLE = np.arange(1, 17, dtype=np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeLlama]:
    files = open_model(str(make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")))
    built = NativeLlama(files.config, packed(files), max_positions=512)
    yield built
    built.close()


def packed(files: ModelFiles) -> PackedWeights:
    return PackedWeights(files.config, FileWeights(files), "bf16")


@pytest.fixture
def cache(model: NativeLlama) -> PagedKvCache:
    return PagedKvCache(NativeLlama.kv_layout(model.config, "bfloat16", 16), 20)


def step(
    model: NativeLlama, cache: PagedKvCache, counter: object = None, **changed: object
) -> NativeStep:
    given = {
        "token_ids": PROMPT,
        "sequences": [SequenceRows(0, len(PROMPT), TABLE)],
        "sample_rows": [5, len(PROMPT) - 1],
    }
    return NativeStep(model, cache=cache, counter=counter, **(given | changed))


def test_cut_between_layers_it_computes_the_same(model: NativeLlama, cache: PagedKvCache) -> None:
    whole = model.forward(
        PROMPT, [SequenceRows(0, len(PROMPT), TABLE)], [5, len(PROMPT) - 1], cache
    )
    kv = [layer.clone() for layer in cache.layers]
    for layer in cache.layers:
        layer.zero_()

    cut = step(model, cache)
    for layer in range(LAYERS):
        cut.run_layers(layer, layer + 1)

    assert (cut.logits == whole).all()
    assert all((a == b).all() for a, b in zip(cache.layers, kv, strict=True))


def test_the_counter_says_which_layers_are_written(model: NativeLlama, cache: PagedKvCache) -> None:
    counter = model.layer_counter()
    cut = step(model, cache, counter)
    for layer in range(LAYERS):
        assert counter.value == layer
        assert not counter.wait(layer + 1, 0.001)
        cut.run_layers(layer, layer + 1)
        # Every row's KV, also of the last block of rows: prompts are longer than one such block.
        last = TABLE[(len(PROMPT) - 1) // 16]
        assert cache.layers[layer][last].any()
    assert counter.wait(LAYERS, 0)

    counter.reset()
    assert counter.value == 0


def test_who_waits_is_woken(model: NativeLlama, cache: PagedKvCache) -> None:
    counter = model.layer_counter()
    seen: list[int] = []

    def watch() -> None:
        for layer in range(LAYERS):
            assert counter.wait(layer + 1, 10)
            seen.append(layer)

    watcher = threading.Thread(target=watch)
    watcher.start()
    step(model, cache, counter).run_layers(0, LAYERS)
    watcher.join(10)

    assert seen == list(range(LAYERS))


@pytest.mark.parametrize(
    "changed,reason",
    [
        ({"token_ids": [*PROMPT[:-1], 100_000]}, "token id"),
        ({"token_ids": [-1, *PROMPT[1:]]}, "token id"),
        ({"sequences": [SequenceRows(300, len(PROMPT), np.arange(40) % 20)]}, "position"),
        ({"sequences": [SequenceRows(-1, len(PROMPT), TABLE)]}, "position"),
        ({"sequences": [SequenceRows(0, len(PROMPT), TABLE + 10)]}, "block id"),
        ({"sequences": [SequenceRows(0, len(PROMPT), TABLE - 2)]}, "block id"),
        ({"sequences": [SequenceRows(0, 7, TABLE)]}, "do not cover"),
        ({"sequences": [SequenceRows(0, 0, TABLE)]}, "do not cover"),
        ({"sample_rows": [len(PROMPT)]}, "do not cover"),
        ({"sequences": [SequenceRows(0, len(PROMPT), TABLE[:3])]}, "does not cover"),
    ],
)
def test_refuses_what_lies_outside(
    model: NativeLlama, cache: PagedKvCache, changed: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        step(model, cache, **changed).run_layers(0, LAYERS)

    assert not any(layer.any() for layer in cache.layers), "nothing was computed"


def test_refuses_layers_it_does_not_have(model: NativeLlama, cache: PagedKvCache) -> None:
    for first, end in ((0, LAYERS + 1), (-1, 1), (2, 1)):
        with pytest.raises(ValueError, match="layer range"):
            step(model, cache).run_layers(first, end)


def test_refuses_a_cache_in_another_order(model: NativeLlama) -> None:
    layout = NativeLlama.kv_layout(model.config, "bfloat16", 16)
    rows = KvLayout(
        **{name: getattr(layout, name) for name in layout.__slots__} | {"order": "rows"}
    )
    with pytest.raises(ValueError, match="bfloat16 in order rows"):
        step(model, PagedKvCache(rows, 20)).run_layers(0, LAYERS)


def test_no_samples_and_no_rows(model: NativeLlama, cache: PagedKvCache) -> None:
    counter = model.layer_counter()

    assert model.forward([], [], [], cache, counter).shape == (0, model.config.vocab_size)
    assert counter.value == LAYERS
    logits = model.forward(PROMPT, [SequenceRows(0, len(PROMPT), TABLE)], [], cache)
    assert logits.shape == (0, model.config.vocab_size)


@pytest.mark.parametrize(
    "changed,named",
    [
        ({"head_dim": 24}, "head_dim 24"),
        ({"head_dim": 272}, "head_dim 272"),
        ({"hidden_size": 72}, "hidden_size 72"),
        ({"intermediate_size": 100}, "intermediate_size 100"),
        ({"num_heads": 9, "num_kv_heads": 3, "head_dim": 16}, "num_heads"),
    ],
)
def test_refuses_shapes_it_cannot_multiply(changed: dict[str, int], named: str) -> None:
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
    }
    fixed = {
        "family": "llama",
        "vocab_size": 100,
        "num_layers": 1,
        "max_positions": 64,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-5,
        "tied_head": True,
        "bos_token_id": None,
        "eos_token_ids": (),
    }
    check_shapes(ModelConfig(**(fixed | shape)))
    with pytest.raises(UnsupportedModel, match=named):
        check_shapes(ModelConfig(**(fixed | shape | changed)))


@pytest.mark.slow
def test_busy_neighbours_slow_it_in_proportion(tmp_path: Path) -> None:
    """One thread per core and as many busy processes: half the machine, not a collapse."""
    files = open_model(str(make_tiny_model(tmp_path / "model")))
    cores = len(os.sched_getaffinity(0))
    model = NativeLlama(files.config, packed(files), cores, max_positions=512)
    cache = PagedKvCache(NativeLlama.kv_layout(files.config, "bfloat16", 16), 20)

    def median_s() -> float:
        times = []
        for _ in range(40):
            began_s = time.perf_counter()
            step(model, cache).run_layers(0, LAYERS)
            times.append(time.perf_counter() - began_s)
        return sorted(times)[20]

    alone_s = median_s()
    neighbours = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)
    ]
    try:
        busy_s = median_s()
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
        model.close()
    # A step that is scheduled out waits a few milliseconds for its turn.
    assert busy_s < 4 * alone_s + 0.03
