"""The scheduler by example: sequences whose KV is handed over, on either side."""

from engine.admission import MAX_OPEN_OFFERS
from engine.plan import Computed, Picked, Sampled
from engine.request import Purpose, Request
from engine.scheduler import Reservation
from tests.engine.scheduler_bench import EOS, LONG, Bench, spans

# ---- sources -------------------------------------------------------------------------------------


def test_a_source_offers_when_picked_and_computes_when_granted() -> None:
    bench = Bench()
    bench.add("s", 40, Purpose.SOURCE)
    plan, picked = bench.scheduler.plan(32)
    assert plan.sequences == () and picked == [Picked("s", 0, (0, 1, 2))]
    assert bench.plan().sequences == () and bench.picked == []
    bench.scheduler.grant("s")
    bench.scheduler.grant("s")
    assert bench.step(32) == [Computed("s", 32)]
    bench.token_id = EOS
    assert bench.step(32) == [Computed("s", 40), Sampled("s", EOS, None)]
    assert not bench.scheduler.has_work()
    assert bench.kv.stats().held == 3
    bench.scheduler.finish("s")
    assert bench.kv.stats().cached == 2 and bench.kv.stats().held == 0


def test_a_source_computes_only_what_its_own_prefix_cache_lacks() -> None:
    bench = Bench()
    prompt = bench.request("s", 48).prompt_token_ids
    bench.scheduler.add(Request("first", prompt, LONG), Purpose.LOCAL, 0.0)
    bench.step()
    bench.scheduler.finish("first")
    bench.scheduler.add(Request("s", prompt, LONG), Purpose.SOURCE, 1.0)
    _, picked = bench.scheduler.plan(1000)
    assert picked == [Picked("s", 32, (0, 1, 3))]
    bench.scheduler.grant("s")
    assert spans(bench.plan()) == [("s", 32, 48)]


def test_ungranted_sources_are_in_nobodys_way() -> None:
    bench = Bench()
    bench.add("s", 40, Purpose.SOURCE)
    bench.add("t", 40, Purpose.SOURCE)
    bench.add("l", 20)
    assert spans(bench.plan()) == [("l", 0, 20)]
    assert bench.picked == ["s", "t", "l"]


def test_sources_are_offered_one_step_ahead() -> None:
    bench = Bench(budget=64, num_blocks=100)
    bench.add("a", 100, Purpose.SOURCE)
    bench.plan(64)
    bench.scheduler.grant("a")
    for name in "bc":
        bench.add(name, 100, Purpose.SOURCE)
    bench.step(32)
    bench.step(32)
    assert bench.picked == ["a"]
    # 36 of its tokens are left: this step and a bit of the next.
    bench.step(32)
    assert bench.picked == ["a", "b", "c"]


def test_open_offers_are_bounded() -> None:
    bench = Bench(num_blocks=100)
    for number in range(MAX_OPEN_OFFERS + 3):
        bench.add(f"s{number}", 10, Purpose.SOURCE)
    bench.add("local", 10)
    assert spans(bench.plan()) == [("local", 0, 10)]
    assert len(bench.picked) == MAX_OPEN_OFFERS + 1


# ---- targets -------------------------------------------------------------------------------------


def test_a_target_reserves_joins_and_decodes() -> None:
    bench = Bench()
    request = bench.request("t", 32)
    assert bench.scheduler.reserve(request, 0.0) == Reservation((0, 1), 0)
    assert bench.scheduler.reserve(request, 0.0) == Reservation((0, 1), 0)
    assert bench.plan().sequences == () and bench.picked == []
    assert bench.kv.hashes(request.prompt_token_ids) and bench.kv.stats().cached == 0
    bench.scheduler.join("t", 9)
    plan = bench.plan()
    assert spans(plan) == [("t", 32, 33)]
    assert plan.sequences[0].token_ids == (9,) and len(plan.sequences[0].block_table) == 3
    assert bench.apply(plan) == [Sampled("t", 7, None)]


def test_a_prompt_is_found_only_after_it_has_landed() -> None:
    bench = Bench()
    first, second, third = (Request(name, tuple(range(40)), LONG) for name in "abc")
    bench.scheduler.reserve(first, 0.0)
    reservation = bench.scheduler.reserve(second, 0.0)
    assert reservation is not None and reservation.num_cached_tokens == 0
    bench.scheduler.join("a", 7)
    reservation = bench.scheduler.reserve(third, 0.0)
    assert reservation is not None and reservation.num_cached_tokens == 32
    bench.scheduler.check_integrity()


def test_a_cancelled_reservation_leaves_nothing_to_find() -> None:
    bench = Bench()
    bench.scheduler.reserve(bench.request("t", 40), 0.0)
    bench.scheduler.finish("t")
    assert bench.kv.stats().free == 20


def test_reservations_keep_the_watermark_unless_idle() -> None:
    bench = Bench(num_blocks=4, watermark=2)
    assert bench.scheduler.reserve(bench.request("a", 60), 0.0) is not None
    bench.scheduler.finish("a")
    assert bench.scheduler.reserve(bench.request("b", 20), 0.0) is not None
    assert bench.scheduler.reserve(bench.request("c", 10), 0.0) is None


def test_reservations_are_bounded_by_decode_slots() -> None:
    bench = Bench(slots=2)
    for name in "ab":
        assert bench.scheduler.reserve(bench.request(name, 10), 0.0) is not None
    third = bench.request("c", 10)
    assert bench.scheduler.reserve(third, 0.0) is None
    bench.scheduler.finish("a")
    assert bench.scheduler.reserve(third, 0.0) is not None
