"""Logprobs in OpenAI's two forms. Pure; knows messages and how tokens are spelled.

Used by ``openai_answers``.
"""

from collections.abc import Callable, Sequence
from typing import Any

from protos import inference_pb2 as public

Json = dict[str, Any]
Spell = Callable[[int], bytes]
"""Token id -> its bytes, which need not be whole characters."""


def chat_logprobs(records: Sequence[public.TokenLogprobs], spell: Spell) -> Json:
    """``logprobs`` of a chat choice or of a part of one."""
    content = [
        _entry(record.token, spell) | {"top_logprobs": [_entry(top, spell) for top in record.top]}
        for record in records
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    records: Sequence[public.TokenLogprobs], spell: Spell, text_offset: int, num_top: int
) -> Json:
    """``logprobs`` of a completion choice or of a part of one.

    Args:
        records: the first of an echoed prompt has no logprob.
        text_offset: of the first token, in characters from the beginning of the text.
        num_top: most alternatives to show of each.
    """
    tokens = [_text(record.token.token_id, spell) for record in records]
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [
            record.token.logprob if _is_told(record) else None for record in records
        ],
        "top_logprobs": [
            _by_text(record, spell, num_top) if _is_told(record) else None for record in records
        ],
        "text_offset": offsets,
    }


def prompt_logprobs(
    records: Sequence[public.TokenLogprobs], spell: Spell, num_top: int
) -> list[Json | None]:
    """``prompt_logprobs`` in vLLM's form: token id -> what is said of it; None for the first."""
    return [_by_id(record, spell, num_top) if _is_told(record) else None for record in records]


def num_characters(records: Sequence[public.TokenLogprobs], spell: Spell) -> int:
    """By how much they move the text offset on."""
    return sum(len(_text(record.token.token_id, spell)) for record in records)


def _is_told(record: public.TokenLogprobs) -> bool:
    """Nothing comes before a prompt's first token, so nothing says how probable it was."""
    return record.token.rank > 0


def _by_id(record: public.TokenLogprobs, spell: Spell, num_top: int) -> Json:
    return {
        str(each.token_id): {
            "logprob": each.logprob,
            "rank": each.rank,
            "decoded_token": _text(each.token_id, spell),
        }
        for each in (*record.top[:num_top], record.token)
    }


def _by_text(record: public.TokenLogprobs, spell: Spell, num_top: int) -> dict[str, float]:
    """The most probable ones and the token itself, which OpenAI adds where it is not among them."""
    every = [*record.top[:num_top], record.token]
    found: dict[str, float] = {}
    for each in every:
        found.setdefault(_text(each.token_id, spell), each.logprob)
    return found


def _entry(token: public.TokenLogprob, spell: Spell) -> Json:
    data = spell(token.token_id)
    text = data.decode("utf-8", "replace")
    return {"token": text, "logprob": token.logprob, "bytes": list(data)}


def _text(token_id: int, spell: Spell) -> str:
    return spell(token_id).decode("utf-8", "replace")
