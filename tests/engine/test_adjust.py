"""What is done to logits: against transformers' processors, and by the definitions."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from engine.adjust import History, adjust, asks
from engine.choice import choose_tokens
from engine.guide import Guides
from engine.plan import ScheduledSequence
from engine.request import SamplingParams

VOCAB, EOS = 40, 39
Ids = list[int]
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=30)


def adjusted(logits: torch.Tensor, *rows: tuple[Ids, Ids, dict[str, Any]]) -> torch.Tensor:
    changed = logits.clone()
    histories = [
        History(SamplingParams(**params), prompt, output) for prompt, output, params in rows
    ]
    adjust(changed.numpy(), histories, (EOS,))
    return changed


def noise(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@given(prompt=IDS.filter(bool), output=IDS, penalty=st.floats(0.3, 3.0), seed=st.integers(0, 99))
def test_repetition_penalty_is_transformers(
    prompt: Ids, output: Ids, penalty: float, seed: int
) -> None:
    logits = noise(1, seed)
    mine = adjusted(logits, (prompt, output, {"repetition_penalty": penalty}))
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + output]), logits.clone()
    )
    torch.testing.assert_close(mine, theirs)


@given(prompt=IDS, output=IDS, frequency=st.floats(-2, 2), presence=st.floats(-2, 2))
def test_counts_are_of_the_output_alone(
    prompt: Ids, output: Ids, frequency: float, presence: float
) -> None:
    logits = noise(1)
    params = {"frequency_penalty": frequency, "presence_penalty": presence}
    expected = logits[0].clone()
    for token in set(output):
        expected[token] -= frequency * output.count(token) + presence
    torch.testing.assert_close(adjusted(logits, (prompt, output, params))[0], expected)


@settings(max_examples=50)
@given(
    rows=st.lists(
        st.tuples(
            IDS,
            IDS,
            st.fixed_dictionaries(
                {},
                optional={
                    "repetition_penalty": st.sampled_from([0.5, 1.0, 1.7]),
                    "frequency_penalty": st.sampled_from([-1.0, 0.5]),
                    "presence_penalty": st.sampled_from([-1.0, 0.5]),
                    "logit_bias": st.sampled_from([(), ((3, -100.0), (4, 2.5))]),
                    "min_tokens": st.integers(0, 20),
                    "stop_token_ids": st.sampled_from([(), (7,)]),
                    "ignore_eos": st.booleans(),
                    "bad_words": st.sampled_from([(), ((1,), (2, 3), (2, 3, 4))]),
                },
            ),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_a_row_does_not_depend_on_the_others(rows: list[tuple[Ids, Ids, dict[str, Any]]]) -> None:
    logits = noise(len(rows))
    together = adjusted(logits, *rows)
    for number, row in enumerate(rows):
        alone = adjusted(logits[number : number + 1], row)
        assert torch.equal(alone[0], together[number])
        _, output, params = row
        if not asks(SamplingParams(**params), len(output)):
            assert torch.equal(alone[0], logits[number])


def is_out(logits: torch.Tensor, token_id: int) -> bool:
    return bool(logits[0, token_id] < -1e29)


def test_no_end_before_min_tokens() -> None:
    params = {"min_tokens": 3, "stop_token_ids": (7,)}
    early = adjusted(noise(1), ([1], [5, 5], params))
    assert is_out(early, EOS) and is_out(early, 7) and not is_out(early, 5)
    late = adjusted(noise(1), ([1], [5, 5, 5], params))
    assert torch.equal(late, noise(1))
    ignoring = adjusted(noise(1), ([1], [], params | {"ignore_eos": True}))
    assert is_out(ignoring, 7) and not is_out(ignoring, EOS), "it ends nothing, so it may come"


@pytest.mark.parametrize(
    ("output", "banned"), [([], {1}), ([2], {1, 3}), ([2, 3], {1, 4}), ([3, 2], {1, 3}), ([4], {1})]
)
def test_bad_words_are_never_completed(output: Ids, banned: set[int]) -> None:
    changed = adjusted(noise(1), ([2, 3], output, {"bad_words": ((1,), (2, 3), (2, 3, 4))}))
    assert {t for t in range(VOCAB) if is_out(changed, t)} == banned


def test_ids_beyond_the_vocabulary_change_nothing() -> None:
    changed = adjusted(noise(1), ([VOCAB + 5], [VOCAB], {"repetition_penalty": 1.5}))
    assert torch.equal(changed, noise(1))


def row(name: str, output: Ids, **params: Any) -> ScheduledSequence:
    sampling = SamplingParams(temperature=0.0, **params)
    return ScheduledSequence(name, (1,), 5 + len(output), (0,), True, sampling, (), [2] * 5, output)


def no_guides() -> Guides:
    raise AssertionError("no row has a guide")


def test_choice_tells_the_models_own_logprobs() -> None:
    logits = noise(3)
    best = int(logits[1].argmax())
    rows = [
        row("plain", []),
        row("barred", [9], logit_bias=((best, -100.0),), logprobs=3),
        row("told", [9], logprobs=0),
    ]
    before = logits.clone()
    result = choose_tokens(logits, rows, (EOS,), no_guides)
    assert torch.equal(logits, before)
    assert result.token_ids["plain"] == int(logits[0].argmax())
    assert result.token_ids["barred"] == int(logits[1].topk(2).indices[1])
    assert set(result.logprobs) == {"barred", "told"}
    expected = logits.double().log_softmax(-1)
    barred = result.logprobs["barred"]
    assert (barred.rank, barred.top[0][0]) == (2, best)
    assert [t for t, _ in barred.top] == logits[1].topk(3).indices.tolist()
    np.testing.assert_allclose([lp for _, lp in barred.top], expected[1].topk(3).values)
    told = result.logprobs["told"]
    assert told.top == () and told.rank == 1
    assert told.logprob == pytest.approx(float(expected[2].max()))


def test_a_row_that_is_not_finite_fails_alone() -> None:
    logits = noise(2)
    logits[0, 3] = float("nan")
    rows = [row("bad", [], logprobs=2), row("good", [], logprobs=2)]
    result = choose_tokens(logits, rows, (), no_guides)
    assert set(result.failures) == {"bad"}
    assert set(result.token_ids) == set(result.logprobs) == {"good"}
