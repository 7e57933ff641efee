"""From a configuration to an engine that can step: model files, runner, KV manager, scheduler.

Slow (weights are read and packed), so it runs on a thread of its own at start. Knows nothing of
sockets. Used by ``services.worker.app``.
"""

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.core import EngineListener
from engine.kv.manager import KvManager
from engine.loaders.files import ModelFiles
from engine.loaders.open import open_model
from engine.loop import Engine
from engine.models.choose import Weights, read_weights
from engine.pace import Pace
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.tokenizer import Tokenizer

WATERMARK_SHARE = 100
"""One block in so many is left for the growth of running answers when a prompt is taken in."""


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A model's files and its weights in memory: what several instances can share."""

    files: ModelFiles
    tokenizer: Tokenizer
    weights: Weights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, with its cache."""

    model_id: str
    tokenizer: Tokenizer
    runner: Runner


def read_model(model: str, config: EngineConfig) -> ReadModel:
    """Read and pack the weights. Starts no thread.

    Raises:
        ModelError: the model cannot be served.
    """
    files = open_model(model)
    return ReadModel(files, files.tokenizer(), read_weights(config, files))


def load_model(read: ReadModel, config: EngineConfig) -> LoadedModel:
    """Lay out the KV cache and start what computes.

    Raises:
        CapacityError: the KV cache is too small for anything.
    """
    return LoadedModel(
        read.files.model_id,
        read.tokenizer,
        Runner(config, read.files, read.weights, read.tokenizer),
    )


def build_engine(loaded: LoadedModel, config: EngineConfig, listener: EngineListener) -> Engine:
    """One engine over a loaded model; not yet started."""
    runner = loaded.runner
    kv = KvManager(
        num_blocks=runner.num_blocks,
        block_size=config.block_size,
        model_digest=runner.model_digest,
        prefix_cache=config.prefix_cache,
        watermark_blocks=runner.num_blocks // WATERMARK_SHARE,
    )
    scheduler = Scheduler(config, kv, runner.model_config.eos_token_ids, runner.max_context)
    return Engine(scheduler, runner, Pace(config), listener)
