"""A conversation with a model: what was said, and the next answer, token by token."""

import time
from collections.abc import Callable
from typing import NamedTuple

from fastbrain.commands.generate_text import Answer, Stops
from fastbrain.errors import SequenceTooLong
from fastbrain.generate import Decoder
from fastbrain.lm import TransformerLm
from fastbrain.sampler import Sampler
from fastbrain.tokens.chat_template import ChatTemplate
from fastbrain.tokens.tokenizer_files import TokenizerFiles


class Reply(NamedTuple):
    """One answer.

    Attributes:
        content: its text.
        finish_reason: "stop", "length" or "interrupted".
        tokens: how many it took, the one that ends it included.
        seconds: until its last one.
        dropped: messages of the oldest turns that had to be forgotten for it.
    """

    content: str
    finish_reason: str
    tokens: int
    seconds: float
    dropped: int


class Session:
    """A model, its template, and the messages so far.

    Attributes:
        messages: as the template takes them; the first may be of the system.
    """

    def __init__(
        self,
        model: TransformerLm,
        files: TokenizerFiles,
        sampler: Sampler,
        max_tokens: int,
        system: str | None,
    ) -> None:
        self.messages: list[dict[str, str]] = []
        self._model = model
        self._files = files
        self._template = ChatTemplate(files)
        self._sampler = sampler
        self._max_tokens = max_tokens
        self._decoder: Decoder | None = None
        if system:
            self.set_system(system)

    @property
    def system(self) -> str | None:
        """What the system says, before all else."""
        return self.messages[0]["content"] if self._first_turn() else None

    def set_system(self, text: str) -> None:
        """Changes what the system says; with no text, it says nothing."""
        del self.messages[: self._first_turn()]
        if text:
            self.messages.insert(0, {"role": "system", "content": text})

    def reset(self) -> None:
        """Forgets all turns; what the system says stays."""
        del self.messages[self._first_turn() :]

    def undo(self) -> bool:
        """Forgets the last question and what followed it; False where there is none."""
        asked = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if asked:
            del self.messages[asked[-1] :]
        return bool(asked)

    def ask(self, text: str, show: Callable[[str], object]) -> Reply:
        """Puts a question; `show` gets the answer piece by piece. Ctrl-C ends it early.

        Raises:
            SequenceTooLong: the question alone leaves no room for an answer; it is forgotten.
        """
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            ids = self._fitting_ids()
        except BaseException:
            self.messages = before
            raise
        dropped = len(before) + 1 - len(self.messages)
        # the last token is chosen but never read
        limit = min(self._max_tokens, self._model.config.max_seq_len - len(ids) + 1)
        answer = Answer(self._files.tokenizer, ids, Stops(frozenset(self._template.end_ids)))
        began = time.perf_counter()
        reason = None
        try:
            decoder = self._fed(ids)
            while len(answer.ids) < limit and not answer.stopped:
                show(answer.push(decoder.next(self._sampler)))
        except KeyboardInterrupt:
            reason = "interrupted"
            self._decoder = None  # it may have been stopped anywhere
        show(answer.end())
        if answer.ids:
            self.messages.append({"role": "assistant", "content": answer.text})
        else:
            self.messages.pop()
        return Reply(
            answer.text,
            reason or answer.finish_reason,
            len(answer.ids),
            time.perf_counter() - began,
            dropped,
        )

    def _first_turn(self) -> int:
        return int(bool(self.messages) and self.messages[0]["role"] == "system")

    def _fitting_ids(self) -> list[int]:
        """The conversation as ids, without its oldest turns where they leave no room."""
        most = self._model.config.max_seq_len
        reserve = min(self._max_tokens, max(most // 4, 1))
        while True:
            ids: list[int] = self._template.encode(self.messages, add_generation_prompt=True).ids
            if len(ids) + reserve - 1 <= most:
                return ids
            first = self._first_turn()
            later = [
                index
                for index, message in enumerate(self.messages)
                if index > first and message["role"] == "user"
            ]
            if later:
                del self.messages[first : later[0]]
            elif len(ids) <= most:
                return ids
            else:
                raise SequenceTooLong(len(ids), most)

    def _fed(self, ids: list[int]) -> Decoder:
        """A decoder that has read `ids`; the one of the last turn, where they go on from it."""
        seen = [] if self._decoder is None else self._decoder.history()
        if self._decoder is None or len(ids) <= len(seen) or ids[: len(seen)] != seen:
            self._decoder, seen = self._model.decoder(), []
        self._decoder.feed(ids[len(seen) :])
        return self._decoder
