"""The tokenizer in a GGUF file's metadata, rebuilt as ``tokenizer.json`` has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from eagle2.errors import ModelError

_PREFIX = "tokenizer.ggml."
_WORD_START = "▁"
# How text is split before merging; the published patterns of Llama 3 and Qwen2.
_SPLITS = {
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
}
_SPLITTERS = ("smollm", "llama-bpe", "qwen2", "gpt-2", "default")
# Tokens that end a turn though the file names another one as its end of sequence.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>")


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """A tokenizer with the ids of the file. Raises ``ModelError`` for a kind that cannot be rebuilt exactly."""
    kind = metadata.get(_PREFIX + "model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise ModelError(f"The GGUF tokenizer {kind!r} is not supported; supported are 'gpt2' and 'llama'.")
    for token, token_type in _vocabulary(metadata):
        if token_type in (TokenType.CONTROL, TokenType.UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == TokenType.USER_DEFINED:
            if kind == "llama" and _WORD_START in token:
                raise ModelError(f"The GGUF tokenizer has the user-defined token {token!r}, which is not supported.")
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    bos = _bos(metadata)
    if bos is not None and _adds_bos(metadata):
        token, token_id = bos
        tokenizer.post_processor = processors.Sequence(
            [
                *([processors.ByteLevel(trim_offsets=True)] if kind == "gpt2" else []),
                processors.TemplateProcessing(f"{token}:0 $A:0", f"{token}:0 $A:0 {token}:1 $B:1", [(token, token_id)]),
            ]
        )
    return tokenizer


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``tokenizer_config.json``: the special tokens by name and the chat template."""
    tokens = metadata[_PREFIX + "tokens"]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"{_PREFIX}{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    template = metadata.get("tokenizer.chat_template")
    return config if template is None else {**config, "chat_template": template}


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Ids at which a generation ends: end of sequence, of turn and of message."""
    keys = ("eos", "eot", "eom")
    named = [metadata[f"{_PREFIX}{key}_token_id"] for key in keys if f"{_PREFIX}{key}_token_id" in metadata]
    # Qwen's published generation configs also stop at the end of a text.
    turn_ends = (*_TURN_ENDS, "<|endoftext|>") if metadata.get(_PREFIX + "pre") == "qwen2" else _TURN_ENDS
    types = dict(_vocabulary(metadata))
    present = [token for token in turn_ends if types.get(token) == TokenType.CONTROL]
    tokens = metadata[_PREFIX + "tokens"]
    return list(dict.fromkeys([*named, *(tokens.index(token) for token in present)]))


def _vocabulary(metadata: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Tokens in id order with their types."""
    tokens: Sequence[str] = metadata[_PREFIX + "tokens"]
    types: Sequence[int] = metadata.get(_PREFIX + "token_type") or [int(TokenType.NORMAL)] * len(tokens)
    return list(zip(tokens, types, strict=True))


def _ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    # Converters fill the tokenizer up to the size of the embedding with unused "[PAD123]" tokens, which no text has.
    return {
        token: i
        for i, (token, token_type) in enumerate(_vocabulary(metadata))
        if not (token_type == TokenType.UNUSED and token.startswith("[PAD"))
    }


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    splitter = metadata.get(_PREFIX + "pre", "default")
    if splitter not in _SPLITTERS:
        raise ModelError(
            f"The GGUF pre-tokenizer {splitter!r} is not supported; supported are {', '.join(_SPLITTERS)}."
        )
    merges = [tuple(merge.split(" ")) for merge in metadata[_PREFIX + "merges"]]
    # Llama 3 takes a word that is a token as it is, even where no merges lead to it.
    tokenizer = Tokenizer(models.BPE(vocab=_ids(metadata), merges=merges, ignore_merges=splitter == "llama-bpe"))
    if splitter in _SPLITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[splitter]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif splitter == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if splitter == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """A SentencePiece BPE. It stores scores, not merges: two pieces merge where their join is one, best score first."""
    ids = _ids(metadata)
    scores: Sequence[float] = metadata[_PREFIX + "scores"]
    mergeable = {token for token, kind in _vocabulary(metadata) if kind == TokenType.NORMAL}
    ranked = [
        (-scores[ids[token]], ids[token], ids[token[:cut]], token[:cut], token[cut:])
        for token in mergeable
        for cut in range(1, len(token))
        if token[:cut] in mergeable and token[cut:] in mergeable
    ]
    merges = [(left, right) for _, _, _, left, right in sorted(ranked)]
    unknown = metadata.get(_PREFIX + "unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=merges,
            unk_token=None if unknown is None else metadata[_PREFIX + "tokens"][unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = [normalizers.Replace(" ", _WORD_START)]
    steps = [decoders.Replace(_WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get(_PREFIX + "add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_WORD_START), *spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _bos(metadata: Mapping[str, Any]) -> tuple[str, int] | None:
    token_id = metadata.get(_PREFIX + "bos_token_id")
    return None if token_id is None else (metadata[_PREFIX + "tokens"][token_id], token_id)


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    by_default = metadata.get(_PREFIX + "model") == "llama" or metadata.get(_PREFIX + "pre") == "llama-bpe"
    return bool(metadata.get(_PREFIX + "add_bos_token", by_default))
