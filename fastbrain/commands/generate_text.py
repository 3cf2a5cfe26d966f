"""Ids into text as they come: whole characters, each once, up to where an answer stops."""

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTEXT = 8  # ids before the first one that may decide how it is written
_UNFINISHED = "\ufffd"
# what a terminal would act on: all control characters but tab and newline
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class TextStream:
    """The text of ids, piece by piece: put together, the pieces are the text of all ids.

    A character may take several ids, so its piece comes with the last of them. What `context`,
    the ids before, makes of the first id (some tokenizers drop a leading space) is allowed for.
    """

    def __init__(self, tokenizer: "Tokenizer", context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context[-_CONTEXT:])
        if self._decoded(self._ids).endswith(_UNFINISHED):
            self._ids = []
        self._slide(0)

    def push(self, id: int) -> str:
        """The text that `id` completes."""
        self._ids.append(id)
        text = self._decoded(self._ids)
        if text.endswith(_UNFINISHED) or not text.startswith(self._shown):
            return ""
        piece = text.removeprefix(self._shown)
        if piece:
            self._slide(self._done)
        return piece

    def end(self) -> str:
        """What is left: characters that were never completed."""
        text = self._decoded(self._ids)
        self._ids = []
        piece = text.removeprefix(self._shown)
        self._slide(0)
        return piece

    def _slide(self, past: int) -> None:
        """Forget the ids before `past`; the rest are shown, and are the context of the next."""
        self._ids = self._ids[past:]
        self._done = len(self._ids)
        self._shown = self._decoded(self._ids)

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


class Stops(NamedTuple):
    """After which ids, and at which texts, an answer stops."""

    ids: frozenset[int]
    texts: tuple[str, ...] = ()


class Answer:
    """What a model says, token by token.

    Attributes:
        ids: all so far, the one that stopped it included.
        text: their text up to the stop, without the id or the text that stopped it; without a
            tokenizer the ids themselves, with commas.
        stopped: whether a stop was met.
    """

    def __init__(self, tokenizer: "Tokenizer | None", prompt: Sequence[int], stops: Stops) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.stopped = False
        self._stream = None if tokenizer is None else TextStream(tokenizer, prompt)
        self._stops = stops
        self._held = ""

    @property
    def finish_reason(self) -> str:
        """Why it ended: "stop" or "length"."""
        return "stop" if self.stopped else "length"

    def push(self, id: int) -> str:
        """Takes the next id; returns the text that is certain now and was not before."""
        self.ids.append(id)
        if id in self._stops.ids:
            self.stopped = True
            return self.end()
        if self._stream is None:
            return self._take(f",{id}" if len(self.ids) > 1 else str(id))
        return self._take(self._stream.push(id))

    def end(self) -> str:
        """Says that no more ids come; returns the text that was held back."""
        return self._take("" if self._stream is None else self._stream.end(), final=True)

    def _take(self, piece: str, final: bool = False) -> str:
        self._held += piece
        found = [at for text in self._stops.texts if (at := self._held.find(text)) >= 0]
        if found:
            self.stopped = True
            piece, self._held = self._held[: min(found)], ""
        else:
            keep = 0 if final else self._beginning_of_a_stop()
            cut = len(self._held) - keep
            piece, self._held = self._held[:cut], self._held[cut:]
        self.text += piece
        return piece

    def _beginning_of_a_stop(self) -> int:
        """How many characters at the end may yet become the text of a stop."""
        most = max((len(text) for text in self._stops.texts), default=1) - 1
        for size in range(min(most, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-size:]) for text in self._stops.texts):
                return size
        return 0


def write(text: str) -> None:
    """Show text on standard output now; a terminal is not given what it would obey."""
    if not text:
        return
    stream = sys.stdout
    if stream.isatty():
        text = harmless(text)
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


def harmless(text: str) -> str:
    """Text with its control characters spelled out, tabs and newlines excepted."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)
