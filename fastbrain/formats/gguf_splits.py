"""The ways of splitting text before byte-pair encoding that GGUF files name, one by one.

A file says by `tokenizer.ggml.pre` how its tokenizer splits, and llama.cpp has the regular
expressions. Another split gives other ids without a word, so only those that are known for certain
are here.
"""

import json
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from fastbrain.errors import InvalidConfig
from fastbrain.formats.strict_json import short

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


class Split(NamedTuple):
    """How a tokenizer treats text before its merges.

    Attributes:
        regexes: applied one after another, each to what the one before has left whole; none is
            GPT-2's own, which tokenizers has built in.
        digits: whether every digit is cut off first.
        whole_words: whether a piece that is a token is taken as it is, without merges.
        bos: whether every text begins with the token for that, where the file does not say.
        composed: whether text is brought into Unicode's composed form.
    """

    regexes: tuple[str, ...] = ()
    digits: bool = False
    whole_words: bool = False
    bos: bool = False
    composed: bool = False

    def apply(self, tokenizer: Tokenizer) -> None:
        """Make a tokenizer split and normalize so."""
        steps: list[Any] = [
            pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in self.regexes
        ]
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.regexes))
        tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
        if self.composed:
            tokenizer.normalizer = normalizers.NFC()


SPLITS = {
    "gpt-2": Split(),
    "smollm": Split(digits=True),
    "llama-bpe": Split((_LLAMA3,), whole_words=True, bos=True),
    "qwen2": Split((_QWEN2,), composed=True),
    # llama.cpp's own, for files of an unknown kind
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}


def split_of(name: Any) -> Split:
    """The split that a file names.

    Raises:
        InvalidConfig: it is not a known one.
    """
    found = SPLITS.get(_ALIASES.get(name, name)) if isinstance(name, str) else None
    if found is None:
        raise InvalidConfig(
            f"tokenizer.ggml.pre is {short(name)}, a way of splitting text that fastbrain does not "
            f"have; it has {', '.join([*SPLITS, *_ALIASES])}"
        )
    return found


def split_name(spec: dict[str, Any]) -> str:
    """The name by which a file says that a tokenizer splits as this one.

    Args:
        spec: the tokenizer, as its tokenizer.json has it.

    Raises:
        InvalidConfig: no name is known for it.
    """
    wanted = _meaning(spec)
    for name, split in SPLITS.items():
        tokenizer = Tokenizer(models.BPE(ignore_merges=split.whole_words))
        split.apply(tokenizer)
        if _meaning(json.loads(tokenizer.to_str())) == wanted:
            return name
    kinds = [spec.get("normalizer"), *_flat(spec.get("pre_tokenizer"))]
    raise InvalidConfig(
        f"the tokenizer splits text by {short([each and each.get('type') for each in kinds])} "
        "(normalizer and pre-tokenizers), or with settings, for which GGUF files have no name that "
        f"fastbrain knows; it knows those of {', '.join(SPLITS)}"
    )


def _meaning(spec: dict[str, Any]) -> tuple[Any, ...]:
    steps = [
        # offsets are of the text, not of the ids
        {key: value for key, value in step.items() if key != "trim_offsets"}
        for step in _flat(spec.get("pre_tokenizer"))
    ]
    return steps, spec.get("normalizer"), bool(spec["model"].get("ignore_merges"))


def _flat(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step.get("type") != "Sequence":
        return [step]
    return [each for inner in step["pretokenizers"] for each in _flat(inner)]
