"""A tokenizer from the keys of a GGUF file. No torch.

The file holds vocabulary and merges, and names the pre-tokenizer, whose rules are not in the file:
they are written here. Called by ``gguf_model``.
"""

from collections.abc import Callable

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from engine.config import ModelConfig
from engine.errors import CorruptModel, UnsupportedModel
from engine.loaders.gguf_file import GgufFile
from engine.tokenizer import SubwordTokenizer, TokenizerTraits, byte_level_bytes

_CONTROL, _USER_DEFINED = 3, 4

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt_2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> pre_tokenizers.PreTokenizer:
    # Digits leave first, one by one: whitespace before a digit is then whitespace at the end of a
    # piece, which GPT-2's pattern keeps together.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt_2()])


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Cut at the matches of each pattern in turn, matches and gaps both being pieces."""
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _default() -> pre_tokenizers.PreTokenizer:
    """What llama.cpp does for files made before pre-tokenizers were named."""
    return _split(
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    )


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _default,
    "gpt-2": _gpt_2,
    "llama-bpe": lambda: _split(_LLAMA_3),
    "qwen2": lambda: _split(_QWEN_2),
    "smollm": _smollm,
}


def tokenizer_from_gguf(file: GgufFile, config: ModelConfig) -> SubwordTokenizer:
    """Build it.

    Raises:
        UnsupportedModel: a kind of vocabulary or a pre-tokenizer that is not known here.
        CorruptModel: keys are missing or contradict each other.
    """
    kind = file.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedModel(
            f"{file.path.name}: tokenizer {kind!r:.40} is not supported, only gpt2 (byte-level BPE)"
        )
    pre = file.text("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{file.path.name}: pre-tokenizer {pre!r:.40} is not supported, only "
            + ", ".join(sorted(_PRE_TOKENIZERS))
        )
    backend = tokenizers.Tokenizer(_byte_level_model(file, ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    added = _added_tokens(file)
    backend.add_tokens(
        [
            AddedToken(content, special=special, normalized=False)
            for content, special in added.values()
        ]
    )
    return SubwordTokenizer(
        backend,
        byte_level_bytes,
        literal={token_id: content.encode() for token_id, (content, _) in added.items()},
        special=frozenset(token_id for token_id, (_, special) in added.items() if special),
        traits=_traits(file, config, pre),
    )


def _byte_level_model(file: GgufFile, ignore_merges: bool) -> models.BPE:
    tokens = file.texts("tokenizer.ggml.tokens")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise CorruptModel(f"{file.path.name}: tokenizer.ggml.tokens has equal tokens")
    merges = []
    for merge in file.texts("tokenizer.ggml.merges"):
        left, separator, right = merge.partition(" ")
        if not separator or not {left, right, left + right} <= vocab.keys():
            raise CorruptModel(
                f"{file.path.name}: merge {merge!r:.80} is not of tokens in the vocabulary"
            )
        merges.append((left, right))
    return models.BPE(vocab, merges, fuse_unk=False, ignore_merges=ignore_merges)


def _added_tokens(file: GgufFile) -> dict[int, tuple[str, bool]]:
    """id -> (content, special) of control and user-defined tokens."""
    tokens = file.texts("tokenizer.ggml.tokens")
    types = file.numbers("tokenizer.ggml.token_type").tolist()
    if len(types) != len(tokens):
        raise CorruptModel(f"{file.path.name}: {len(types)} token types for {len(tokens)} tokens")
    return {
        token_id: (tokens[token_id], kind == _CONTROL)
        for token_id, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    }


def _traits(file: GgufFile, config: ModelConfig, pre: str) -> TokenizerTraits:
    """BOS is added when the file says so; silent files follow llama.cpp: Llama 3 adds it."""
    add_bos = file.flag("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    template = "tokenizer.chat_template"
    return TokenizerTraits(
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
        prefix_ids=_wanted(file, add_bos, config.bos_token_id, "bos"),
        suffix_ids=_wanted(
            file,
            file.flag("tokenizer.ggml.add_eos_token", False),
            config.eos_token_ids[0] if config.eos_token_ids else None,
            "eos",
        ),
        chat_template=file.text(template) if template in file.keys else None,
    )


def _wanted(file: GgufFile, add: bool, token_id: int | None, name: str) -> tuple[int, ...]:
    if not add:
        return ()
    if token_id is None:
        raise CorruptModel(
            f"{file.path.name}: add_{name}_token is set, but there is no {name}_token_id"
        )
    return (token_id,)
