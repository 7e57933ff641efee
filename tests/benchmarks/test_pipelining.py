"""The busy shares come from what instances say, and every cluster of the table starts."""

from pathlib import Path

import pytest

from benchmarks.pipelining import WAYS, Load, Seen, busy_shares, cluster, row, run, step_seconds
from benchmarks.serve import Answered
from tests.tiny_model import make_tiny_model


def test_a_share_is_the_growth_of_step_seconds_over_the_time_passed() -> None:
    before = {"prefill": {"a": 10.0}, "decode": {"b": 0.0, "c": 5.0}}
    after = {"prefill": {"a": 15.0}, "decode": {"b": 10.0, "c": 5.0}}
    assert busy_shares(before, after, 10.0) == {"prefill": 0.5, "decode": 0.5}


def test_a_row_says_medians_and_leaves_nothing_out() -> None:
    answered = Answered(1.0, [1.1, 1.2, 1.3], output_tokens=3)
    seen = Seen({"decode": [0.5, 0.7]}, [answered], [30.0], num_failed=2)
    assert row("one", seen) == "| one | decode 60% | 60% | 100 | 100.0 | 30 | 1 | 2 |"


@pytest.mark.slow
async def test_a_run_measures_a_real_cluster(tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path / "tiny"))
    seen = Seen()
    with cluster(model, (*WAYS["1P1D"], "--kv-cache-bytes", "64MiB")) as address:
        assert set(step_seconds(address)) == {"prefill", "decode"}
        await run(address, Load(4, (8, 16), (4, 8), 0.5, 1.5), 0, seen)
    assert seen.num_failed == 0 and len(seen.answers) > 4
    assert all(0 < share[0] <= 1 for share in seen.busy.values()) and len(seen.busy) == 2
