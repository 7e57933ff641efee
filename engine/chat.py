"""Chat messages to a prompt, by the model's own template. No torch.

The template is code that came with the model: it runs in jinja2's immutable sandbox, with the
names that Hugging Face templates expect. Knows nothing of the API's message types; the router
calls it.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import InvalidRequest
from engine.tokenizer import Tokenizer

_FIELD = "messages"
_CUT = "\ue000cut here\ue001"
"""Marks where a message that is continued ends; private-use characters that no text should hold."""
RESERVED_NAMES = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("bos_token", "eos_token", "strftime_now", "raise_exception"),
    }
)
"""What a template reads from us, never from the arguments that a client adds."""


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a chat. BOS is there if the template writes it, and then once.

    Raises:
        InvalidRequest: see ``render_chat``.
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_ids
    text = render_chat(
        tokenizer.chat_template,
        messages,
        bos_token=_spelling(tokenizer, bos),
        eos_token=_spelling(tokenizer, eos[0] if eos else None),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=tools,
        template_kwargs=template_kwargs,
    )
    return tokenizer.encode(text, add_special_tokens=False, field=_FIELD)


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos_token: str,
    eos_token: str,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    now: datetime.datetime | None = None,
) -> str:
    """The chat as text, special tokens by name.

    Args:
        template: jinja2 source as in tokenizer_config.json.
        add_generation_prompt: end with the beginning of an answer.
        continue_final_message: end where the last message's content ends, so that the answer goes
            on with it; no beginning of an answer is added then.
        template_kwargs: more names for the template; none of ``RESERVED_NAMES``.
        now: what ``strftime_now`` formats; None: the local time.

    Raises:
        InvalidRequest: there is no template, or it refuses the messages.
    """
    if template is None:
        raise InvalidRequest(_FIELD, "this model has no chat template; send a prompt instead")
    if not messages:
        raise InvalidRequest(_FIELD, "there are none; send at least one")
    shown = list(messages)
    if continue_final_message:
        shown[-1] = {**shown[-1], "content": shown[-1]["content"] + _CUT}
    try:
        text = _compile(template).render(
            **(template_kwargs or {}),
            messages=shown,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            bos_token=bos_token,
            eos_token=eos_token,
            strftime_now=(now or datetime.datetime.now()).strftime,
        )
    # A template is foreign code: what it raises on odd messages can be of any type.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InvalidRequest(_FIELD, f"the model's chat template failed: {reason:.300}") from error
    if not continue_final_message:
        return text
    whole, mark, _ = text.rpartition(_CUT)
    if not mark:
        raise InvalidRequest(_FIELD, "the model's chat template does not write the last message")
    return whole


def _spelling(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.id_to_token(token_id) or ""


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As models were trained on: plain JSON; jinja2's own filter escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationTag(Extension):
    """``{% generation %}`` marks an answer for training; in serving its body stands as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
