"""Random arrivals, sizes, aborts, handoffs and failures: the scheduler keeps every promise.

Checked on the way: budgets, decode first, chunk ends, no block owned twice. Checked at the end:
every answer equals the undisturbed one, everybody came to an end, nothing is held.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import CapacityError
from engine.order import PRIORITY_STEP_S, Schedule
from engine.request import FinishReason, Purpose, Request, SamplingParams
from tests.engine.scheduler_simulation import MAX_CONTEXT, Chances, Simulation

# Prompts with common beginnings, so that blocks are shared, and lengths at the edges of blocks.
TEMPLATES = [
    tuple(range(MAX_CONTEXT)),
    tuple(range(32)) + tuple(range(300, 420)),
    tuple(range(48)) + tuple(range(500, 620)),
]
LENGTHS = [1, 5, 15, 16, 17, 31, 32, 33, 40, 48, 49, 64, 65, 90]
PURPOSES = {
    "decode instance": [Purpose.TARGET, Purpose.TARGET, Purpose.LOCAL],
    "prefill instance": [Purpose.SOURCE],
    "colocated": [Purpose.LOCAL],
    "everything": list(Purpose),
}

worlds = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "num_blocks": st.sampled_from([12, 7, 20, 40]),
        "block_size": st.sampled_from([16, 16, 32]),
        "watermark": st.integers(0, 2),
        "config": st.builds(
            EngineConfig,
            token_budget=st.sampled_from([40, 64, 256]),
            max_decode_sequences=st.sampled_from([1, 3, 8]),
            schedule=st.sampled_from(["decode_first", "prefill_first"]),
            max_prefill_batch=st.sampled_from([64, 1, 2]),
            max_consecutive_prefill_steps=st.sampled_from([4, 1, 2]),
        ),
    }
)


def random_request(rng: random.Random, number: int) -> Request:
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(100),
        max_tokens=rng.choice([1, 2, 8, 30, 100]),
        n=rng.choice([1, 1, 1, 2, 3]),
        stop_token_ids=(ord("z"),) if rng.random() < 0.2 else (),
        ignore_eos=rng.random() < 0.6,
    )
    prompt = rng.choice(TEMPLATES)[: rng.choice(LENGTHS)]
    return Request(f"r{number}", prompt, sampling, rng.randint(-1, 1), rng.choice(["", "", "a"]))


def submit_some(simulation: Simulation, count: int, purposes: list[Purpose]) -> None:
    rng = simulation.rng
    for _ in range(count):
        request = random_request(rng, len(simulation.jobs))
        purpose = rng.choice(purposes)
        if can_ever_fit(simulation, request, purpose):
            simulation.submit(request, purpose)
        else:
            num_jobs = len(simulation.jobs)
            with pytest.raises(CapacityError):
                simulation.submit(request, Purpose.LOCAL)
            simulation.jobs = dict(list(simulation.jobs.items())[:num_jobs])


def can_ever_fit(simulation: Simulation, request: Request, purpose: Purpose) -> bool:
    num_tokens, num_forks = len(request.prompt_token_ids), request.sampling.n - 1
    if num_tokens >= simulation.scheduler.max_sequence_tokens:
        return False
    num_blocks = -(-num_tokens // simulation.kv.block_size) + num_forks
    return (
        purpose is Purpose.SOURCE
        or num_forks == 0
        or (
            num_forks < simulation.config.max_decode_sequences
            and num_blocks <= simulation.kv.stats().total
        )
    )


def live_through(simulation: Simulation, purposes: list[Purpose], num_requests: int) -> None:
    rng = simulation.rng
    while len(simulation.jobs) < num_requests:
        submit_some(simulation, rng.choice([0, 0, 1, 3]), purposes)
        simulation.step(rng.choice([1, 16, 40, 1000]))
    # Nobody disturbs any more: what is left comes to its end in a bounded number of steps.
    calm = Chances(abort=0, lose_row=0, fail_row=0, crash=0)
    simulation.chances = calm
    todo = sum(
        len(job.request.prompt_token_ids) + job.request.sampling.max_tokens
        for job in simulation.live()
    )
    deadline = simulation.num_steps + 3 * todo + 100
    while simulation.live():
        assert simulation.num_steps < deadline, "somebody starves"
        simulation.step(rng.choice([1, 16, 40, 1000]))
    for job in simulation.jobs.values():
        if job.purpose is not Purpose.SOURCE:
            simulation.check_answer(job)
    simulation.check_over()


@pytest.mark.parametrize("role", PURPOSES)
@settings(max_examples=25, deadline=None)
@given(world=worlds)
def test_disturbed_work_ends_as_if_undisturbed(role: str, world: dict[str, object]) -> None:
    live_through(Simulation(**world), PURPOSES[role], num_requests=12)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("role", PURPOSES)
@settings(max_examples=120, deadline=None)
@given(world=worlds)
def test_disturbed_work_ends_as_if_undisturbed_at_length(
    role: str, world: dict[str, object]
) -> None:
    live_through(Simulation(**world), PURPOSES[role], num_requests=25)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("seed", range(3))
def test_preempted_work_always_ends(seed: int, schedule: Schedule) -> None:
    """Twelve answers of 60 tokens in blocks for three: nobody is aborted, all are exact."""
    config = EngineConfig(token_budget=64, max_decode_sequences=8, schedule=schedule)
    simulation = Simulation(seed, num_blocks=14, block_size=16, watermark=0, config=config)
    simulation.chances = Chances(abort=0, lose_row=0, fail_row=0, crash=0)
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    for number in range(12):
        prompt = TEMPLATES[number % 3][: 10 + number]
        purpose = Purpose.TARGET if number % 2 else Purpose.LOCAL
        simulation.submit(Request(f"r{number}", prompt, sampling), purpose)
    while simulation.live():
        assert simulation.num_steps < 1500
        simulation.step(64)
    assert simulation.scheduler.stats().num_preemptions > 5
    for job in simulation.jobs.values():
        assert job.ended is FinishReason.LENGTH and len(job.output) == 60
        simulation.check_answer(job)
    simulation.check_over()


@settings(max_examples=25, deadline=None)
@given(
    schedule=st.sampled_from(list(Schedule)),
    priority=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_nobody_starves_under_endless_arrivals(
    schedule: Schedule, priority: int, seed: int
) -> None:
    """One request of low priority; more urgent ones keep coming, faster than they are served.

    Ten requests arrive a second. Aging lets at most those of ``priority`` levels overtake, and
    each is bounded: so is the wait, whatever comes behind.
    """
    config = EngineConfig(
        token_budget=64, max_decode_sequences=3, schedule=schedule, max_consecutive_prefill_steps=2
    )
    simulation = Simulation(seed, num_blocks=20, block_size=16, watermark=1, config=config)
    simulation.chances = Chances(abort=0, lose_row=0, fail_row=0, crash=0)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    modest = simulation.submit(
        Request("modest", TEMPLATES[0][:30], sampling, priority), Purpose.LOCAL
    )
    step_s = 0.1
    num_overtaking = 1 + int(priority * PRIORITY_STEP_S / step_s)
    most_steps = 20 + 8 * num_overtaking
    while modest.ended is None:
        assert simulation.num_steps < most_steps, "starves"
        prompt = simulation.rng.choice(TEMPLATES)[: simulation.rng.choice([5, 16, 33])]
        name = f"urgent{simulation.num_steps}"
        simulation.submit(Request(name, prompt, sampling, 0), Purpose.LOCAL)
        simulation.step(64)
    simulation.check_answer(modest)
