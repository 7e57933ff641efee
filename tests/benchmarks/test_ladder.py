"""All ways of the ladder write the same, and account for what they take."""

from pathlib import Path

import pytest

from benchmarks.ladder_ways import WAYS, Report, Terms, serve
from engine.config import EngineConfig
from engine.loaders.open import open_model
from engine.runner import Runner
from tests.tiny_model import make_tiny_model

TERMS = Terms(
    concurrency=6, num_requests=14, prompt_tokens=(5, 90), output_tokens=(4, 40), kv_tokens=512
)
CONFIG = EngineConfig(dtype="float32", kv_cache_bytes=1 << 22, prefix_cache=False)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    path: Path = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    runner = Runner(CONFIG, open_model(str(path)))
    return {way: serve(way, TERMS, runner, CONFIG) for way in WAYS}


def test_they_write_the_same(reports: dict[str, Report]) -> None:
    for report in reports.values():
        assert report.outputs == reports["static"].outputs
        assert len(report.gaps_s) == report.num_tokens - TERMS.num_requests
    lengths = {len(output) for output in reports["static"].outputs.values()}
    assert len(lengths) > 5 and min(lengths) >= 4 and max(lengths) <= 40


def test_memory_is_what_it_was_meant_to_be(reports: dict[str, Report]) -> None:
    block_size, longest = CONFIG.block_size, TERMS.longest
    for report in reports.values():
        assert report.most_blocks * block_size <= TERMS.kv_tokens
        assert 0 < report.used_ratio <= 1
    # Room for the longest that there can be: three at once, whatever they are.
    assert reports["static"].largest_batch == TERMS.kv_tokens // (-(-longest // 16) * 16) == 3
    assert 3 < reports["paged"].largest_batch <= 6
    assert reports["chunked"].largest_batch == reports["continuous"].largest_batch == 6
    assert reports["static"].used_ratio < reports["paged"].used_ratio
    assert reports["paged"].used_ratio < reports["continuous"].used_ratio
