"""Who gets blocks and who gives way, by example."""

from engine.plan import Sampled
from engine.request import Purpose
from engine.scheduler import Reservation
from tests.engine.scheduler_bench import Bench, spans

# ---- the line ------------------------------------------------------------------------------------


def test_who_does_not_fit_is_not_overtaken() -> None:
    bench = Bench(num_blocks=6)
    bench.add("holder", 40)
    bench.step()
    bench.add("large", 60)
    bench.add("small", 10)
    bench.step()
    assert bench.picked == ["holder"]
    small_target = bench.request("target", 10)
    assert bench.scheduler.reserve(small_target, 9.0) is None
    bench.scheduler.finish("holder")
    bench.step()
    assert bench.picked == ["holder", "large", "small"]
    assert bench.scheduler.reserve(small_target, 10.0) is not None
    # Nobody is blocked any more.
    bench.scheduler.finish("small")
    assert bench.scheduler.reserve(bench.request("newcomer", 10), 11.0) is not None


def test_a_waiting_reservation_is_not_overtaken_and_its_blocks_are_set_aside() -> None:
    bench = Bench(num_blocks=6)
    bench.add("holder", 40)
    bench.step()
    target = bench.request("target", 60)
    assert bench.scheduler.reserve(target, 5.0) is None
    bench.add("small", 10)
    bench.num_added = 9
    bench.add("later", 10)
    bench.step()
    bench.scheduler.finish("small")
    bench.step()
    assert "later" not in bench.picked
    bench.scheduler.finish("holder")
    bench.step()
    assert bench.picked[-1] == "later"
    assert bench.scheduler.reserve(target, 11.0) == Reservation(bench.kv.block_table("target"), 0)


def test_priority_goes_first_and_age_counts() -> None:
    bench = Bench(budget=48)
    bench.add("late", 40, priority=1)
    bench.add("normal", 40)
    bench.add("first", 40, priority=-1)
    for name in ("first", "normal", "late"):
        assert spans(bench.plan(40)) == [(name, 0, 40)]
        bench.scheduler.fail([name], "one is enough")
    assert bench.picked == ["first", "normal", "late"]


def test_locals_get_blocks_only_when_the_step_has_room_for_them() -> None:
    bench = Bench(budget=64)
    for name in "abcd":
        bench.add(name, 40)
    assert spans(bench.plan(64)) == [("a", 0, 40), ("b", 0, 16)]
    assert bench.picked == ["a", "b"]


def test_the_more_urgent_is_computed_first_though_another_has_begun() -> None:
    bench = Bench()
    bench.add("begun", 100)
    bench.step(32)
    bench.add("urgent", 40, priority=-1)
    assert spans(bench.plan(48)) == [("urgent", 0, 40)]


# ---- giving way ----------------------------------------------------------------------------------


def test_the_youngest_gives_way_and_its_answer_goes_on() -> None:
    bench = Bench(num_blocks=4)
    bench.add("old", 30)
    bench.add("young", 30)
    told = [event for _ in range(3) for event in bench.step() if isinstance(event, Sampled)]
    assert [event.request_id for event in told] == ["old", "young"] * 3
    plan = bench.plan()
    assert spans(plan) == [("old", 32, 33)]
    assert bench.scheduler.stats().num_preemptions == 1
    assert bench.scheduler.num_waiting == 1
    bench.apply(plan)
    bench.scheduler.finish("old")
    plan = bench.plan()
    # Its first block is still cached; the rest, its own output included, is computed again.
    assert spans(plan) == [("young", 16, 33)]
    assert plan.sequences[0].token_ids[-3:] == (7, 7, 7) and plan.sequences[0].samples
    assert bench.apply(plan) == [Sampled("young", 7, None)]
    assert bench.picked == ["old", "young"]


def test_neither_a_source_nor_a_landing_prompt_gives_way() -> None:
    bench = Bench(num_blocks=5)
    bench.add("old", 30)
    bench.step()
    bench.add("s", 10, Purpose.SOURCE)
    bench.step()
    assert bench.scheduler.reserve(bench.request("t", 30), 9.0) is not None
    bench.step()
    # Nobody else may be preempted, so the one that grows gives way itself, and comes back.
    assert bench.plan().sequences == ()
    assert bench.scheduler.stats().num_preemptions == 1
    assert bench.scheduler.num_running == 2
    bench.scheduler.finish("t")
    assert spans(bench.plan()) == [("old", 32, 33)]


def test_who_was_preempted_is_next_in_line() -> None:
    bench = Bench(num_blocks=4)
    bench.add("old", 30)
    bench.add("young", 30)
    for _ in range(3):
        bench.step()
    bench.add("new", 5)
    bench.step()
    assert bench.scheduler.reserve(bench.request("target", 5), 9.0) is None
    bench.step()
    assert "new" not in bench.picked


def test_the_first_in_line_keeps_its_place_when_a_later_one_gives_way() -> None:
    bench = Bench(num_blocks=4)
    bench.add("old", 30)
    bench.add("young", 30)
    bench.step()
    bench.add("urgent", 40, priority=-1)
    for _ in range(3):
        bench.step()
    assert bench.scheduler.stats().num_preemptions == 1
    between = bench.request("between", 5)
    assert bench.scheduler.reserve(between, 1.5) is None
    bench.scheduler.finish("old")
    bench.step()
    assert bench.picked[-1] == "urgent"
