"""Several answers written anew: nothing is told twice, and nothing is patched together."""

import pytest

from protos import inference_pb2 as public
from services.router.replay import Replay
from services.runtime.errors import Unavailable


def tokens(index: int, *ids: int) -> public.Tokens:
    return public.Tokens(index=index, token_ids=ids)


def test_what_was_told_is_not_told_again() -> None:
    replay = Replay()
    for event in (tokens(0, 1), tokens(1, 9), tokens(0, 2)):
        assert replay.is_new(event)
    replay.restart()
    assert [replay.is_new(tokens(0, i)) for i in (1, 2, 3)] == [False, False, True]
    assert [replay.is_new(tokens(1, i)) for i in (9, 8)] == [False, True]
    assert replay.is_new(public.ChoiceFinished(index=1))
    replay.restart()
    assert not any(replay.is_new(tokens(1, i)) for i in (9, 8))
    assert not replay.is_new(public.ChoiceFinished(index=1))
    assert replay.is_new(tokens(2, 5))


def test_another_answer_is_no_continuation() -> None:
    replay = Replay()
    assert replay.is_new(tokens(0, 1))
    replay.restart()
    with pytest.raises(Unavailable, match="differently"):
        replay.is_new(tokens(0, 2))
