"""What is learned of instances' speed."""

import random

import pytest

from services.router.rates import ENOUGH, Rates


def test_nothing_is_known_before_enough_was_seen() -> None:
    rates = Rates()
    for n in range(ENOUGH):
        assert not rates.are_known
        rates.saw_prefill(10 + n, 0, 0.1)
        rates.saw_decode(1 + n, 5, 0.01)
    assert rates.are_known


def test_a_quadratic_machine_is_found_out_through_noise() -> None:
    """Weights cost 0.2 ms a token, attention 0.1 us a pair."""

    def truth(num_tokens: int, num_cached: int) -> float:
        return 2e-4 * num_tokens + 1e-7 * num_tokens * (num_cached + num_tokens / 2)

    rng, rates = random.Random(1), Rates()
    for _ in range(200):
        num_tokens, num_cached = rng.randint(10, 8000), rng.choice((0, 512, 4096))
        seen_s = truth(num_tokens, num_cached) * rng.uniform(0.95, 1.05)
        rates.saw_prefill(num_tokens, num_cached, seen_s)
    for num_tokens, num_cached in ((100, 0), (4000, 0), (4000, 4096), (8000, 0)):
        predicted = rates.prefill_s(num_tokens, num_cached)
        assert predicted == pytest.approx(truth(num_tokens, num_cached), rel=0.2)


def test_alike_observations_are_no_trouble() -> None:
    rates = Rates()
    for _ in range(50):
        rates.saw_prefill(100, 0, 0.1)
        rates.saw_decode(1, 8, 0.01)
    assert rates.prefill_s(100) == pytest.approx(0.1, rel=1e-3)
    assert 0 < rates.prefill_s(1000) < 20
    assert rates.step_s(1) == pytest.approx(0.01, rel=1e-3)
    assert rates.step_s(16) > 0


def test_times_are_never_negative() -> None:
    rng = random.Random(2)
    for _ in range(200):
        rates = Rates()
        for _ in range(6):
            rates.saw_prefill(rng.randint(1, 9999), rng.randint(0, 99), rng.random())
            rates.saw_decode(rng.randint(1, 64), rng.randint(1, 99), rng.random())
        for size in (1, 50, 100_000):
            assert rates.prefill_s(size, size) >= 0 and rates.step_s(size) >= 0


def test_a_machine_that_gets_slower_is_noticed() -> None:
    rates = Rates()
    for step_s in [0.01] * 200 + [0.03] * 100:
        rates.saw_decode(1, 8, step_s)
    assert rates.step_s(1) == pytest.approx(0.03, rel=0.1)


def test_a_line_is_known_by_its_pair_else_by_all() -> None:
    rates = Rates()
    rates.saw_handoff("p", "near", 100, 0.0)
    rates.saw_handoff("p", "far", 100, 1.0)
    assert rates.handoff_s("p", "near", 50) == 0
    assert rates.handoff_s("p", "far", 50) == pytest.approx(0.5)
    assert 0 < rates.handoff_s("p", "new", 50) < 0.5
    rates.keep_only(["p", "near"])
    assert rates.handoff_s("p", "far", 50) == rates.handoff_s("p", "new", 50)


def test_answers_are_no_longer_than_asked_for() -> None:
    rates = Rates()
    rates.saw_decode(1, 40, 0.01)
    assert rates.answer_tokens(1000) == 40
    assert rates.answer_tokens(7) == 7
