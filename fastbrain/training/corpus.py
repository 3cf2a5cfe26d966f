"""What a run trains on and is scored on: rows that are a function of the step, and held-out ones.

Text is read as windows at random places. Instructions are rows that were packed once, and come in
an order that is new in every epoch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastbrain.losses import chunks
from fastbrain.tokens.packed_file import PackedFile
from fastbrain.tokens.token_batch import TokenBatch
from fastbrain.tokens.token_file import TokenFile
from fastbrain.training.vocabulary import Vocabulary

# an evaluation reads at most this much held-out text: the loss of a million tokens is known to
# about 0.003, and 5 % of a large corpus would take longer to score than to train on
EVALUATION_TOKENS = 2**20

_PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Corpus(ABC):
    """The rows of a run.

    Attributes:
        vocabulary: None for a token file without a tokenizer.
        fingerprint: of the files: bytes, tokens, largest id, digests.
        replaced: fingerprints of files that earlier parts of the run were trained on.
        bytes_per_token: UTF-8 bytes of held-out text to a token; None where it is not known.
        seq_len: tokens of a row.
    """

    vocabulary: Vocabulary | None
    fingerprint: dict[str, Any]
    replaced: list[dict[str, Any]]
    bytes_per_token: float | None
    seq_len: int

    @abstractmethod
    def sizes(self) -> str:
        """In words, how much there is to train on and how much is held out."""

    @property
    def epoch_rows(self) -> int | None:
        """Rows of an epoch; None where there are no epochs."""
        return None

    @abstractmethod
    def origins(self, step: int, rows: int) -> list[int]:
        """Where the rows of a step counted from 0 lie; what kind of place is the corpus's own."""

    @abstractmethod
    def read(self, origins: list[int]) -> TokenBatch:
        """The rows that lie there."""

    @abstractmethod
    def head(self, origin: int, tokens: int) -> list[int]:
        """At most so many ids from the begin of a row."""

    @abstractmethod
    def held_out_batches(self, sequences: int) -> Iterator[TokenBatch]:
        """All held-out rows, `sequences` at a time."""

    @abstractmethod
    def prompts(self, count: int, most: int) -> list[list[int]]:
        """Up to `count` beginnings from what is held out, of at most `most` ids, for samples."""

    @property
    @abstractmethod
    def ends(self) -> tuple[int, ...]:
        """The ids that end a sample; none where it may run on."""

    def step_batches(self, step: int, rows: int, micro: int) -> Iterator[TokenBatch]:
        """The micro-batches of a step counted from 0: its rows, cut in order.

        Which rows depends on the seed, the step and `rows` only; `micro` divides `rows`.
        """
        whole = self.read(self.origins(step, rows))
        for first in range(0, rows, micro):
            yield whole.slice(first, first + micro)

    def text(self, ids: list[int]) -> str:
        """The text of ids, or the ids where there is no tokenizer."""
        if self.vocabulary is None:
            return " " + " ".join(map(str, ids))
        return self.vocabulary.text(ids)


@dataclass(frozen=True)
class TextCorpus(Corpus):
    """Windows of token files; a place is the position of its first token."""

    train: TokenFile
    held_out: TokenFile

    def sizes(self) -> str:
        return (
            f"tokens: {self.train.tokens():,} to train on, {self.held_out.tokens():,} held out "
            "and scored"
        )

    def origins(self, step: int, rows: int) -> list[int]:
        found: list[int] = self.train.offsets(step, rows, self.seq_len).tolist()
        return found

    def read(self, origins: list[int]) -> TokenBatch:
        return self.train.windows(origins, self.seq_len)

    def head(self, origin: int, tokens: int) -> list[int]:
        found: list[int] = self.train.read(origin, min(tokens, self.seq_len)).tolist()
        return found

    def held_out_batches(self, sequences: int) -> Iterator[TokenBatch]:
        return chunks(lambda index: self.held_out.chunk(index, sequences, self.seq_len))

    def prompts(self, count: int, most: int) -> list[list[int]]:
        length = min(_PROMPT_TOKENS, most, self.held_out.tokens() // 2)
        last = self.held_out.tokens() - length
        starts = [last * index // max(count - 1, 1) for index in range(count)]
        return [self.held_out.read(start, length).tolist() for start in starts]

    @property
    def ends(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class InstructionCorpus(Corpus):
    """Packed conversations; a place is the number of a row."""

    train: PackedFile
    held_out: PackedFile

    def sizes(self) -> str:
        return (
            f"packed rows: {self.train.rows():,} to train on, {self.held_out.rows():,} held out "
            "and scored"
        )

    @property
    def epoch_rows(self) -> int | None:
        return self.train.rows()

    def origins(self, step: int, rows: int) -> list[int]:
        return self.train.indices(step, rows)

    def read(self, origins: list[int]) -> TokenBatch:
        return self.train.batch(origins)

    def head(self, origin: int, tokens: int) -> list[int]:
        found: list[int] = self.train.batch([origin]).ids[0, :tokens].tolist()
        return found

    def held_out_batches(self, sequences: int) -> Iterator[TokenBatch]:
        return chunks(lambda index: self.held_out.chunk(index, sequences))

    def prompts(self, count: int, most: int) -> list[list[int]]:
        found = []
        for row in range(min(count, self.held_out.rows())):
            batch = self.held_out.batch([row * self.held_out.rows() // count])
            # row t predicts token t + 1, so the first response begins after the first that does
            begin = int(batch.targets()[1][0].nonzero()[0]) + 1
            found.append(batch.ids[0, :begin].tolist()[-most:])
        return found

    @property
    def ends(self) -> tuple[int, ...]:
        return () if self.vocabulary is None else self.vocabulary.files.ends
