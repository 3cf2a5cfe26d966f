"""Instruction data to a file of packed rows, with every bad row named or counted."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fastbrain import atomic
from fastbrain.errors import EmptyDataset, InvalidConfig, InvalidDataset
from fastbrain.tokens.chat_template import ChatTemplate, Encoded, marked_text
from fastbrain.tokens.conversations import (
    IGNORED,
    Content,
    Conversation,
    Format,
    Tokenized,
    detect,
    read_row,
)
from fastbrain.tokens.documents import Read
from fastbrain.tokens.faults import Faults
from fastbrain.tokens.json_rows import BadRow, Row, json_rows
from fastbrain.tokens.packed_file import BEGIN, ID_END, U32, document_words, row_words
from fastbrain.tokens.packing import best_fit
from fastbrain.tokens.progress import Progress
from fastbrain.tokens.sources import JSONL, source_files

_SHOWN = 2  # examples
_SHOWN_CHARACTERS = 2000


@dataclass(frozen=True)
class Example:
    """A conversation that can be learned from.

    Attributes:
        words: its ids and targets, as `packed_file.document_words` has them.
        targets: how many tokens are predicted.
    """

    words: U32
    targets: int


@dataclass(frozen=True)
class PreparedInstructions:
    """A packed file that is ready to train on.

    Attributes:
        path, sha256: the file and its digest.
        rows, tokens: its length in rows, and in words, padding counted.
        max_id: the largest id in it.
        examples, skipped: how many rows of the data became documents, and how many were left out.
        reasons: for each kind of reason how many were left out for it.
        document_tokens: tokens that are no padding.
        targets: tokens that are predicted.
        format: of the rows of the data.
        text_bytes: UTF-8 bytes of the messages; 0 for ids.
    """

    path: Path
    rows: int
    tokens: int
    max_id: int
    sha256: str
    examples: int
    skipped: int
    reasons: dict[str, int]
    document_tokens: int
    targets: int
    format: str
    text_bytes: int


@dataclass
class Rows:
    """The rows of a data set, one after another, as examples.

    Attributes:
        format: of the rows, once there was one that could be told.
        reasons: how many were skipped, by kind.
        tokens: how many the examples have so far.
        text_bytes: UTF-8 bytes of their messages.
        shown: the first examples, marked, with their places.
    """

    template: ChatTemplate
    seq_len: int
    faults: Faults
    format: Format | None = None
    reasons: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    text_bytes: int = 0
    shown: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._vocab_size = min(self.template.files.size, ID_END)

    def examples(self, path: Path, read: Read) -> Iterator[Example]:
        """Those of one file; the bad ones go to `faults`."""
        for line, row in json_rows(path, read):
            place = f"{path}, line {line}"
            try:
                if isinstance(row, BadRow):
                    raise row
                example = self._example(row, place)
            except BadRow as error:
                self.faults.add(path, line, str(error))
                self.reasons[error.kind] += 1
                continue
            yield example

    def _example(self, row: Row, place: str) -> Example:
        form = self.format or detect(row)
        content = read_row(form, row)
        encoded = self._encoded(content)
        check_example(encoded, self.template, self.seq_len)
        self.format = form
        self.tokens += len(encoded.ids)
        if isinstance(content, Conversation):
            self.text_bytes += sum(len(m["content"].encode()) for m in content.messages)
        if len(self.shown) < _SHOWN:
            self.shown.append((place, self._marked(content, encoded)))
        return Example(document_words(*encoded), sum(encoded.is_target[1:]))

    def _encoded(self, content: Content) -> Encoded:
        if isinstance(content, Tokenized):
            _check_tokenized(content, self._vocab_size, self.template.end_ids)
            return Encoded(content.ids, [label != IGNORED for label in content.labels])
        try:
            return self.template.encode(content.messages)
        except InvalidDataset as error:
            raise BadRow("refused by the template", str(error)) from error

    def _marked(self, content: Content, encoded: Encoded) -> str:
        if isinstance(content, Conversation):
            return self.template.marked(content.messages)
        decode = self.template.files.tokenizer.decode
        return marked_text(
            [
                (decode(encoded.ids[first:last], skip_special_tokens=False), learned)
                for first, last, learned in _runs(encoded.is_target)
            ]
        )


def check_example(encoded: Encoded, template: ChatTemplate, seq_len: int) -> None:
    """Raise BadRow for ids that cannot be learned from as they are."""
    ids, bos = encoded.ids, template.files.bos
    if len(ids) > seq_len:
        raise BadRow(
            "longer than seq_len",
            f"it has {len(ids)} tokens, more than seq_len {seq_len}, and cutting it would lose its "
            "end; leave it out, shorten it, or use a longer seq_len",
        )
    if bos is not None and ids[:2] == [template.files.tokenizer.token_to_id(bos)] * 2:
        raise BadRow("two BOS", f"it begins with {bos} twice; only one may add it")
    if not any(encoded.is_target):
        raise BadRow("no target", "none of its tokens is to be learned: it has no response")
    if not any(encoded.is_target[1:]):
        raise BadRow(
            "no target", "only its first token is to be learned, which nothing comes before"
        )


def prepare_instructions(
    source: atomic.StrPath,
    target: atomic.StrPath,
    template: ChatTemplate,
    seq_len: int,
    *,
    skip_bad: bool = False,
    show: Callable[[str], object] | None = None,
) -> PreparedInstructions:
    """Make the packed file `target` of the conversations in `source`.

    Args:
        source: a .jsonl file, also packed as .gz or .zst, or a directory of such files, all of one
            of the formats in `conversations.py`.
        target: replaced once all is well; until then, and after an error, as it was.
        template: renders conversations and knows the tokenizer.
        seq_len: tokens of a row; a longer conversation is bad, never cut.
        skip_bad: whether bad rows are left out and counted, or the first one stops the work.
        show: is given lines that say what was found, two examples among them.

    Raises InvalidDataset for a bad row, naming file and line, EmptyDataset if nothing is left,
    InvalidConfig for a bad seq_len or kind of source, Io.
    """
    if seq_len < 2:
        raise InvalidConfig(f"seq_len is {seq_len}; a row needs 2 tokens to predict one")
    faults = Faults("skip" if skip_bad else "fail", lambda line, reason: None)
    rows = Rows(template, seq_len, faults)
    files = list(source_files(Path(source), JSONL).values())
    examples = _read_all(files, rows, Path(target).name)
    if rows.format is None or not examples:
        left_out = f": all {faults.skipped} rows were bad" if faults.skipped else ""
        raise EmptyDataset(f"there are no conversations in {source}{left_out}")
    bins = best_fit([len(each.words) for each in examples], seq_len)
    digest = hashlib.sha256()
    with atomic.replacing(target) as file:
        for row in bins:
            words = row_words([examples[index].words for index in row], seq_len)
            data = words.astype("<u4", copy=False).tobytes()
            digest.update(data)
            file.write(data)
    prepared = PreparedInstructions(
        path=Path(target),
        rows=len(bins),
        tokens=len(bins) * seq_len,
        max_id=max(int((each.words & np.uint32(BEGIN - 1)).max()) for each in examples),
        sha256=digest.hexdigest(),
        examples=len(examples),
        skipped=faults.skipped,
        reasons=dict(sorted(rows.reasons.items())),
        document_tokens=rows.tokens,
        targets=sum(each.targets for each in examples),
        format=rows.format.name,
        text_bytes=rows.text_bytes,
    )
    if show is not None:
        for line in _report(prepared, rows, seq_len):
            show(line)
    return prepared


def _read_all(files: Sequence[Path], rows: Rows, name: str) -> list[Example]:
    found: list[Example] = []
    before = 0
    with Progress(name, sum(path.stat().st_size for path in files)) as shown:
        for path in files:

            def read(count: int, before: int = before) -> None:
                shown.update(before + count, rows.tokens)

            found += rows.examples(path, read)
            before += path.stat().st_size
    return found


def _report(prepared: PreparedInstructions, rows: Rows, seq_len: int) -> Iterator[str]:
    assert rows.format is not None
    yield f"format: {prepared.format} ({', '.join(rows.format.fields)})"
    for number, (place, text) in enumerate(rows.shown, 1):
        yield f"example {number} ({place}); what is learned is between [[ and ]]:"
        half = _SHOWN_CHARACTERS // 2
        yield text if len(text) <= 2 * half else f"{text[:half]}\n[...]\n{text[-half:]}"
    padding = 1 - prepared.document_tokens / prepared.tokens
    yield (
        f"{prepared.examples:,} examples, {prepared.document_tokens:,} tokens, of which "
        f"{prepared.targets:,} are learned, in {prepared.rows:,} rows of {seq_len:,}; "
        f"{100 * padding:.1f} % is padding"
    )
    if prepared.skipped:
        reasons = ", ".join(f"{count:,} {kind}" for kind, count in prepared.reasons.items())
        yield f"skipped {prepared.skipped:,} rows: {reasons}"


def _check_tokenized(content: Tokenized, vocab_size: int, end_ids: Sequence[int]) -> None:
    for at, id in enumerate(content.ids):
        if not 0 <= id < vocab_size:
            raise BadRow(
                "id outside the vocabulary",
                f"input_ids[{at}] is {id}; the tokenizer has ids 0 to {vocab_size - 1}",
            )
    learned = [run for run in _runs([label != IGNORED for label in content.labels]) if run[2]]
    # what was cut somewhere else lacks the end of its last response
    if learned and not set(content.ids[learned[-1][0] : learned[-1][1]]) & set(end_ids):
        ends = ", ".join(map(str, end_ids))
        raise BadRow(
            "no EOS",
            f"its last response has no label that ends it ({ends}), so a model would not learn to "
            "stop",
        )


def _runs(flags: Sequence[bool]) -> Iterator[tuple[int, int, bool]]:
    first = 0
    for at in range(1, len(flags) + 1):
        if at == len(flags) or flags[at] != flags[first]:
            yield first, at, flags[first]
            first = at
