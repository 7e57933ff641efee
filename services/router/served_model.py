"""The model as the router knows it: names, limits, tokenizer, chat template. No weights, no torch.

Encoding a long text takes a thread, so that streams go on meanwhile. Knows nothing of requests.
Made by ``app`` from ``engine.loaders``, used by ``intake`` and by both public faces.
"""

import asyncio
from collections.abc import Iterable
from threading import Lock

from engine.chat import encode_chat
from engine.errors import InvalidRequest
from engine.guide import Guides
from engine.loaders.files import ModelFiles
from engine.loaders.open import open_model
from engine.request import Guide
from engine.tokenizer import Tokenizer
from services.router.chats import Chat, template_messages, template_tools
from services.router.tool_styles import (
    MAX_FORCED_CALLS,
    described,
    forcing_guide,
    shows_tools,
    style_of,
)
from services.runtime.errors import InvalidArgument, NotFound

_LONG_TEXT_CHARACTERS = 4096
"""Longer texts take about a millisecond or more to encode."""


class ServedModel:
    """The one model of a cluster."""

    def __init__(
        self,
        model_id: str,
        aliases: tuple[str, ...],
        family: str,
        max_context: int,
        vocab_size: int,
        tokenizer: Tokenizer,
    ) -> None:
        self.model_id = model_id
        self.aliases = aliases
        self.family = family
        self.max_context = max_context
        """Tokens the model was trained for; instances may hold less."""
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.tool_style = style_of(tokenizer.chat_template)
        self.tool_marker_ids = _special_ids(tokenizer, self.tool_style.markers)
        """The special tokens that mark tool calls, by what they are spelled like."""
        self._guides: Guides | None = None
        self._making_guides = Lock()
        longest = max(
            (len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)), default=1
        )
        self.max_prompt_characters = max_context * longest
        """A longer text has more tokens than the context, whatever they are."""

    @classmethod
    def open(cls, model: str) -> "ServedModel":
        """Read what the router needs of ``model``.

        Raises:
            ModelError: see ``open_model``.
        """
        files: ModelFiles = open_model(model)
        config = files.config
        return cls(
            files.model_id,
            files.aliases,
            config.family,
            config.longest_context,
            config.vocab_size,
            files.tokenizer(),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Every name a client may use."""
        return (self.model_id, *self.aliases)

    def check_name(self, name: str) -> None:
        """Raises: NotFound: another model."""
        if name not in self.names:
            raise NotFound(
                f"model: {name[:200]!r} is not served here; there is {', '.join(self.names)}"
            )

    async def encode(self, text: str, field: str) -> list[int]:
        """Token ids of a prompt.

        Raises:
            InvalidRequest: not a text; names ``field``.
        """
        if len(text) <= _LONG_TEXT_CHARACTERS:
            return self.tokenizer.encode(text, field=field)
        return await asyncio.to_thread(self.tokenizer.encode, text, field=field)

    async def check_guide(self, guide: Guide, field: str) -> None:
        """Compile a guide, on a thread: before anything is computed for it.

        Raises:
            InvalidArgument: it is not what it should be; names ``field``.
        """
        try:
            await asyncio.to_thread(self._check_guide, guide)
        except InvalidRequest as error:
            raise InvalidArgument(field, error.reason) from error

    def _check_guide(self, guide: Guide) -> None:
        with self._making_guides:
            if self._guides is None:
                self._guides = Guides(self.tokenizer, self.vocab_size)
        self._guides.check(guide)

    def forcing_guide(self, chat: Chat) -> Guide:
        """A guide under which the answer calls what ``chat`` says it must."""
        tools = [tool for tool in chat.tools if chat.forced_tool in ("", tool.name)]
        most_calls = chat.most_calls or MAX_FORCED_CALLS
        return forcing_guide(self.tool_style, tools, most_calls, self.tool_marker_ids)

    async def encode_chat(self, chat: Chat) -> list[int]:
        """Token ids of a chat, up to where the answer begins.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses the messages.
        """
        if chat.num_characters <= _LONG_TEXT_CHARACTERS:
            return self._encode_chat(chat)
        return await asyncio.to_thread(self._encode_chat, chat)

    def _encode_chat(self, chat: Chat) -> list[int]:
        messages, tools = template_messages(chat.turns), template_tools(chat.offered)
        if not shows_tools(self.tokenizer.chat_template):
            messages, tools = described(messages, tools), []
        return encode_chat(
            self.tokenizer,
            messages,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            tools=tools or None,
            template_kwargs=chat.template_kwargs,
        )


def _special_ids(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, int]:
    """Of those texts that are spelled like one special token."""
    found = {text: tokenizer.encode(text, add_special_tokens=False) for text in texts}
    return {
        text: token_ids[0]
        for text, token_ids in found.items()
        if len(token_ids) == 1 and tokenizer.is_special(token_ids[0])
    }
