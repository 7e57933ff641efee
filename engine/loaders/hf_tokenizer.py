"""A tokenizer from the files of a Hugging Face directory. No torch, no transformers.

tokenizer.json holds the tokenizer itself; tokenizer_config.json and chat_template.jinja say how a
text begins and how a chat is written. Called by ``hf_directory``.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from engine.config import ModelConfig
from engine.errors import CorruptModel, ModelNotFound, UnsupportedModel
from engine.loaders.hf_fields import read_object
from engine.tokenizer import (
    SubwordTokenizer,
    TokenizerTraits,
    byte_level_bytes,
    sentencepiece_bytes,
)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Everything that is read here, in the order in which it enters the model's identity."""


def tokenizer_from_directory(directory: Path, config: ModelConfig) -> SubwordTokenizer:
    """Build it.

    Raises:
        ModelNotFound: there is no tokenizer.json.
        UnsupportedModel: it decodes in a way that is not known here.
        CorruptModel: it cannot be read, or contradicts config.json.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelNotFound(f"{directory} has no tokenizer.json")
    description = read_object(path)
    spell, strips = _decoder_style(description.get("decoder"))
    backend = _backend(description)
    options_path = directory / "tokenizer_config.json"
    options = read_object(options_path) if options_path.is_file() else {}
    added = {token_id: token for token_id, token in backend.get_added_tokens_decoder().items()}
    literal = {
        token_id: token.content.encode() if spell is byte_level_bytes else spell(token.content)
        for token_id, token in added.items()
    }
    special = frozenset(token_id for token_id, token in added.items() if token.special)
    traits = _traits(backend, options, config, _chat_template(directory, options), strips)
    tokenizer = SubwordTokenizer(backend, spell, literal, special, traits)
    if tokenizer.vocab_size > config.vocab_size:
        raise CorruptModel(
            f"{directory.name}: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"config.json allows {config.vocab_size}"
        )
    return tokenizer


def _backend(description: Mapping[str, Any]) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(description))
    # The library raises plain Exception, and a Rust panic derives from BaseException.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise CorruptModel(f"tokenizer.json cannot be used: {reason:.200}") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _decoder_style(decoder: Any) -> tuple[Callable[[str], bytes], bool]:
    """How a token spells bytes, and whether the first space of a text is dropped."""
    match decoder:
        case {"type": "ByteLevel"}:
            return byte_level_bytes, False
        case {"type": "Sequence", "decoders": list(steps)}:
            kinds = [step.get("type") if isinstance(step, dict) else None for step in steps]
            if kinds[:3] == ["Replace", "ByteFallback", "Fuse"]:
                replace = (steps[0].get("pattern"), steps[0].get("content"))
                strip = [(s.get("content"), s.get("start"), s.get("stop")) for s in steps[3:]]
                if replace == ({"String": "\u2581"}, " ") and strip in ([], [(" ", 1, 0)]):
                    return sentencepiece_bytes, bool(strip)
    kind = decoder.get("type") if isinstance(decoder, dict) else None
    raise UnsupportedModel(
        f"tokenizer.json: decoder {kind!r:.40} is not supported, only byte-level and "
        "SentencePiece with byte fallback"
    )


def _traits(
    backend: tokenizers.Tokenizer,
    options: Mapping[str, Any],
    config: ModelConfig,
    chat_template: str | None,
    strips_leading_space: bool,
) -> TokenizerTraits:
    bos = _token_id(backend, options, "bos_token")
    bos = config.bos_token_id if bos is None else bos
    eos = _token_id(backend, options, "eos_token")
    eos_token_ids = config.eos_token_ids or (() if eos is None else (eos,))
    prefix, suffix = _surroundings(backend)
    for flag, token_id in (("add_bos_token", bos), ("add_eos_token", eos)):
        wanted = options.get(flag)
        if not isinstance(wanted, bool):
            continue
        if wanted and token_id is None:
            raise CorruptModel(f"tokenizer_config.json: {flag} is set, but there is no such token")
        ids = (token_id,) if wanted and token_id is not None else ()
        if flag == "add_bos_token":
            prefix = ids
        else:
            suffix = ids
    return TokenizerTraits(bos, eos_token_ids, prefix, suffix, chat_template, strips_leading_space)


def _surroundings(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a text."""
    encoding = backend.encode("a", add_special_tokens=True)
    ids, mask = list(encoding.ids), list(encoding.special_tokens_mask)
    if 0 not in mask:
        return (), ()
    first, last = mask.index(0), len(mask) - mask[::-1].index(0)
    return tuple(ids[:first]), tuple(ids[last:])


def _token_id(backend: tokenizers.Tokenizer, options: Mapping[str, Any], name: str) -> int | None:
    """Id of a named token, written as a string or as an object with ``content``."""
    value = options.get(name)
    content = value.get("content") if isinstance(value, dict) else value
    if content is None:
        return None
    if not isinstance(content, str):
        raise CorruptModel(f"tokenizer_config.json: {name} is not a token")
    token_id: int | None = backend.token_to_id(content)
    return token_id


def _chat_template(directory: Path, options: Mapping[str, Any]) -> str | None:
    """The file wins over the option; of several named templates, the one named ``default``."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except OSError as error:
            raise ModelNotFound(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise CorruptModel(f"{directory.name}/{path.name} is not UTF-8") from None
    template = options.get("chat_template")
    if isinstance(template, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CorruptModel(f"{directory.name}/tokenizer_config.json: chat_template is not a string")
    return template
