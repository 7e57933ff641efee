"""The step thread: events, layers, failures, and calls from other threads while it runs."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from engine.config import EngineConfig
from engine.core import StepRecord
from engine.errors import CapacityError
from engine.kv.manager import KvManager
from engine.loop import Engine
from engine.pace import Pace
from engine.plan import Computed, EngineEvent, Failed, Picked, Sampled, StepPlan, StepResult
from engine.request import FinishReason, Purpose, Request, SamplingParams
from engine.scheduler import Scheduler

NUM_LAYERS = 3


class CountingRunner:
    """The next token is the sequence's length; can be told to wait or to fail."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.running = threading.Event()
        self.fail_next = False

    def run(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepResult:
        self.running.set()
        assert self.gate.wait(10)
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("out of luck")
        for layer in range(NUM_LAYERS):
            if on_layer is not None:
                on_layer(layer)
        return StepResult({s.request_id: s.end for s in plan.sequences if s.samples})


class Listener:
    """Remembers everything and lets tests wait for it."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self.layers: list[tuple[str, int, int]] = []
        self.records: list[StepRecord] = []
        self._heard = threading.Condition()

    def wants_layers(self, plan: StepPlan) -> bool:
        return True

    def layer_written(self, plan: StepPlan, layer: int) -> None:
        self.layers += [(s.request_id, layer, s.end) for s in plan.sequences]

    def stepped(self, events: list[EngineEvent], record: StepRecord | None) -> None:
        with self._heard:
            self.events += events
            self.records += [record] if record else []
            self._heard.notify_all()

    def wait(self, kind: type[EngineEvent], request_id: str, count: int = 1) -> list[EngineEvent]:
        def seen() -> list[EngineEvent]:
            return [e for e in self.events if isinstance(e, kind) and e.request_id == request_id]

        with self._heard:
            assert self._heard.wait_for(lambda: len(seen()) >= count, 10), self.events
            return seen()


class Rig:
    def __init__(self, num_blocks: int = 64) -> None:
        self.runner, self.listener = CountingRunner(), Listener()
        kv = KvManager(num_blocks, 16, "digest")
        scheduler = Scheduler(EngineConfig(), kv, eos_token_ids=(), max_context=1024)
        self.engine = Engine(scheduler, self.runner, Pace(EngineConfig()), self.listener)
        self.engine.start()


@pytest.fixture
def rig() -> Iterator[Rig]:
    built = Rig()
    yield built
    built.runner.gate.set()
    built.engine.check_integrity()
    built.engine.stop()


def make(request_id: str, length: int = 20, max_tokens: int = 4) -> Request:
    return Request(request_id, tuple(range(length)), SamplingParams(0.0, max_tokens=max_tokens))


def test_a_local_request_from_pick_to_length(rig: Rig) -> None:
    rig.engine.submit(make("a"), Purpose.LOCAL)
    tokens = rig.listener.wait(Sampled, "a", count=4)
    assert [e.token_id for e in tokens] == [20, 21, 22, 23]
    assert [e.finish_reason for e in tokens] == [None, None, None, FinishReason.LENGTH]
    assert len(rig.listener.wait(Picked, "a")) == 1
    assert rig.engine.load().blocks.held == 0
    assert sum(r.num_prefill_tokens for r in rig.listener.records) == 20


def test_a_source_waits_for_its_grant_and_keeps_its_blocks(rig: Rig) -> None:
    rig.engine.submit(make("a"), Purpose.SOURCE)
    rig.listener.wait(Picked, "a")
    time.sleep(0.05)
    assert not rig.listener.records, "computed before the grant"
    rig.engine.grant("a")
    assert len(rig.listener.wait(Sampled, "a")) == 1
    assert [layer for _, layer, end in rig.listener.layers if end == 20] == [0, 1, 2]
    assert rig.listener.wait(Computed, "a")
    assert rig.engine.load().blocks.held == 2
    rig.engine.finish("a")
    assert rig.engine.load().blocks.held == 0


def test_a_target_reserves_joins_and_decodes(rig: Rig) -> None:
    request = make("a", max_tokens=3)
    reservation = rig.engine.reserve(request)
    assert reservation is not None and len(reservation.block_table) == 2
    rig.engine.join("a", 20)
    assert [e.token_id for e in rig.listener.wait(Sampled, "a", 2)] == [21, 22]


def test_reserving_does_not_wait_for_a_running_step(rig: Rig) -> None:
    rig.runner.gate.clear()
    rig.engine.submit(make("slow"), Purpose.LOCAL)
    assert rig.runner.running.wait(10)
    assert rig.engine.reserve(make("a")) is not None
    rig.engine.finish("a")


def test_blocks_of_a_running_step_are_freed_after_it(rig: Rig) -> None:
    rig.runner.gate.clear()
    rig.engine.submit(make("a"), Purpose.LOCAL)
    assert rig.runner.running.wait(10)
    rig.engine.finish("a")
    assert rig.engine.load().blocks.held == 2
    rig.runner.gate.set()
    deadline_s = time.monotonic() + 5
    while rig.engine.load().blocks.held and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert rig.engine.load().blocks.held == 0
    assert not any(isinstance(e, Sampled) for e in rig.listener.events)


def test_a_failed_step_ends_its_sequences_and_the_engine_lives_on(rig: Rig) -> None:
    rig.runner.fail_next = True
    rig.engine.submit(make("a"), Purpose.LOCAL)
    (failed,) = rig.listener.wait(Failed, "a")
    assert "RuntimeError" in failed.reason and "out of luck" not in failed.reason
    assert rig.engine.load().blocks.held == 0
    rig.engine.submit(make("b"), Purpose.LOCAL)
    rig.listener.wait(Sampled, "b", count=4)


def test_what_can_never_fit_is_refused_at_once(rig: Rig) -> None:
    with pytest.raises(CapacityError):
        rig.engine.submit(make("a", length=64 * 16 + 1), Purpose.LOCAL)
    with pytest.raises(CapacityError):
        rig.engine.reserve(make("a", length=64 * 16 + 1))


def test_a_bug_in_the_scheduler_is_told_to_whoever_watches(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Scheduler, "plan", bug)
    rig.engine.submit(make("a"), Purpose.LOCAL)
    deadline_s = time.monotonic() + 5
    with pytest.raises(ZeroDivisionError):
        while time.monotonic() < deadline_s:
            rig.engine.raise_bug()
            time.sleep(0.01)


def test_stop_is_idempotent_and_needs_no_start() -> None:
    rig = Rig()
    rig.engine.stop()
    rig.engine.stop()
