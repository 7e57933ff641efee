"""The chunk limit follows measured speed."""

from engine.config import EngineConfig
from engine.pace import Pace


def settle(pace: Pace, token_s: float, steps: int = 40) -> None:
    for _ in range(steps):
        chunk = pace.limit_tokens()
        pace.observe(chunk, 0, chunk * token_s)


def test_limit_converges_to_the_time_bound() -> None:
    pace = Pace(EngineConfig(max_step_s=0.2, token_budget=4096))
    settle(pace, token_s=0.001)
    assert 180 <= pace.limit_tokens() <= 220
    settle(pace, token_s=0.004)
    assert 45 <= pace.limit_tokens() <= 55


def test_limit_stays_within_one_and_the_budget() -> None:
    pace = Pace(EngineConfig(max_step_s=0.2, token_budget=512))
    settle(pace, token_s=1e-6)
    assert pace.limit_tokens() == 512
    settle(pace, token_s=10.0)
    assert pace.limit_tokens() == 1


def test_a_short_slow_chunk_does_not_make_tokens_look_dear() -> None:
    pace = Pace(EngineConfig(max_step_s=0.2, token_budget=4096))
    settle(pace, token_s=0.001)
    before = pace.limit_tokens()
    for _ in range(50):
        pace.observe(1, 0, 0.02)
    assert pace.limit_tokens() == before


def test_decode_only_steps_say_nothing() -> None:
    pace = Pace(EngineConfig(max_step_s=0.2, token_budget=4096))
    before = pace.limit_tokens()
    pace.observe(0, 64, 5.0)
    assert pace.limit_tokens() == before


def test_beside_decodes_the_gap_is_the_bound() -> None:
    pace = Pace(EngineConfig(max_step_s=0.2, max_gap_s=0.05, token_budget=4096))
    settle(pace, token_s=0.001)
    assert 45 <= pace.limit_tokens(beside_decodes=True) <= 55
