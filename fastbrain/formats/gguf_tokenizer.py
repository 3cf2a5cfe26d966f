"""A byte-level BPE tokenizer as the keys of a GGUF file, both ways."""

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from fastbrain.errors import InvalidConfig, InvalidSnapshot, Serde
from fastbrain.formats.gguf_splits import split_name, split_of
from fastbrain.formats.strict_json import short
from fastbrain.tokens.tokenizer_files import TokenizerFiles

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_NONE = ("none", "no_vocab")


def tokenizer_keys(files: TokenizerFiles | None, vocab_size: int) -> dict[str, Any]:
    """The keys that describe a tokenizer, in the order of our files.

    Ids that the tokenizer does not use are listed as `[PAD<id>]`.

    Raises:
        InvalidConfig: it is larger than the vocabulary, or not one that a GGUF file can describe.
    """
    if files is None:
        return {"tokenizer.ggml.model": _NONE[0]}
    if files.size > vocab_size:
        raise InvalidConfig(
            f"the tokenizer has {files.size} ids, more than the model's vocab_size of {vocab_size}"
        )
    spec = json.loads(files.tokenizer.to_str())
    merges = _merges(spec["model"])
    pre = split_name(spec)
    added = {token["id"]: token for token in spec["added_tokens"]}
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [_UNUSED] * vocab_size
    for token, i in files.tokenizer.get_vocab(with_added_tokens=True).items():
        tokens[i], types[i] = token, _type(added.get(i))
    if len(set(tokens)) < vocab_size:
        raise InvalidConfig(
            "the tokenizer has a token such as [PAD0], which stands for an unused id"
        )
    bos = files.tokenizer.token_to_id(files.bos or files.eos)
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        # without one, llama.cpp takes id 11
        "tokenizer.ggml.bos_token_id": bos,
        "tokenizer.ggml.eos_token_id": files.eos_id,
        "tokenizer.ggml.padding_token_id": files.pad_id,
        "tokenizer.ggml.add_bos_token": _adds_bos(files.tokenizer, bos),
    }
    if len(files.ends) > 1:
        keys["tokenizer.ggml.eot_token_id"] = files.ends[1]
    if files.chat_template:
        keys["tokenizer.chat_template"] = files.chat_template
    return keys


def read_tokenizer(values: Mapping[str, Any], vocab_size: int) -> TokenizerFiles | None:
    """The tokenizer that a file's keys describe; None where they say that there is none.

    Raises:
        InvalidConfig: it is of a kind, or splits text in a way, that fastbrain does not have.
        InvalidSnapshot: a token is there twice, or an id is not one of the model's.
        Serde: a key is missing or not what it should be.
    """
    kind = values.get("tokenizer.ggml.model", _NONE[0])
    if kind in _NONE:
        return None
    if kind != "gpt2":
        raise InvalidConfig(
            f"tokenizer.ggml.model is {short(kind)}; fastbrain has byte-level BPE tokenizers, "
            "which are called gpt2"
        )
    split = split_of(values.get("tokenizer.ggml.pre"))
    tokens: list[str] = _list(values, "tokens", str)
    types = _list(values, "token_type", int, [_NORMAL] * len(tokens))
    if not len(types) == len(tokens) <= vocab_size:
        raise InvalidSnapshot(
            f"there are {len(tokens)} tokens, {len(types)} token types and {vocab_size} rows of "
            "the embedding"
        )
    used = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    if len(used) + types.count(_UNUSED) < len(tokens):
        raise InvalidSnapshot("a token is in tokenizer.ggml.tokens twice")
    merges = [_pair(merge, used) for merge in _list(values, "merges", str)]
    tokenizer = Tokenizer(models.BPE(vocab=used, merges=merges, ignore_merges=split.whole_words))
    split.apply(tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, types)

    def token(name: str, default: str | None = None) -> str | None:
        i = values.get(f"tokenizer.ggml.{name}_token_id")
        if i is None:
            return default
        if type(i) is not int or not 0 <= i < len(tokens) or types[i] == _UNUSED:
            raise InvalidSnapshot(
                f"tokenizer.ggml.{name}_token_id is {short(i)}, which is no token"
            )
        return tokens[i]

    bos, eos, end = token("bos"), token("eos"), token("eot")
    if eos is None:
        raise InvalidConfig("tokenizer.ggml.eos_token_id is missing: nothing would end a text")
    if values.get("tokenizer.ggml.add_bos_token", split.bos):
        _begin_with(tokenizer, bos)
    template = values.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise Serde(f"tokenizer.chat_template must be a text, not {short(template)}")
    return TokenizerFiles(
        tokenizer,
        eos,
        token("padding", eos) or eos,
        bos if bos != eos else None,
        template,
        () if end is None else (used[end],),
    )


def _merges(model: dict[str, Any]) -> list[str]:
    strange = [
        key
        for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
        if model.get(key)
    ] + [key for key in ("byte_fallback",) if model.get(key)]
    if model.get("type") != "BPE" or strange:
        raise InvalidConfig(
            f"the tokenizer is a {model.get('type')} model"
            + (f" with {', '.join(strange)}" if strange else "")
            + "; a GGUF file takes plain byte-level BPE from fastbrain"
        )
    # older tokenizers write a pair as one text
    pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    if not pairs or any(len(pair) != 2 or " " in "".join(pair) for pair in pairs):
        raise InvalidConfig(
            "the tokenizer has no merges, or one of tokens with a space in them; a GGUF file "
            "cannot hold that"
        )
    return [" ".join(pair) for pair in pairs]


def _type(added: dict[str, Any] | None) -> int:
    if added is None:
        return _NORMAL
    if added["lstrip"] or added["rstrip"] or added["single_word"]:
        raise InvalidConfig(
            f"the token {short(added['content'])} takes the space around it, or stands only as a "
            "word of its own; a GGUF file cannot say so"
        )
    return _CONTROL if added["special"] else _USER_DEFINED


def _adds_bos(tokenizer: Tokenizer, bos: int | None) -> bool:
    added: list[int] = tokenizer.encode("").ids
    if added not in ([], [bos]):
        raise InvalidConfig(
            f"the tokenizer adds the ids {added} to every text; a GGUF file can say that of the "
            f"token that begins one, {bos}"
        )
    return bool(added)


def _list(
    values: Mapping[str, Any], name: str, kind: type, default: list[Any] | None = None
) -> list[Any]:
    found = values.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(found, list) or any(type(each) is not kind for each in found):
        raise Serde(f"tokenizer.ggml.{name} must be a list of {kind.__name__}, not {short(found)}")
    return found


def _pair(merge: str, vocab: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if left not in vocab or right not in vocab or left + right not in vocab:
        raise InvalidSnapshot(f"the merge {short(merge)} is not of tokens that give a token")
    return left, right


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_UNKNOWN, _CONTROL):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, normalized=False))
        elif kind not in (_NORMAL, _UNUSED):
            raise Serde(f"the token {short(token)} is of type {kind}, which fastbrain cannot use")
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _begin_with(tokenizer: Tokenizer, bos: str | None) -> None:
    if bos is None:
        raise InvalidConfig(
            "every text is to begin with a token, but tokenizer.ggml.bos_token_id is missing"
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
