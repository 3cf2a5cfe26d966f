"""A conversation as token ids, and which of them the model learns to say.

The template's own special tokens become control ids. What a message says is encoded as plain
text, so it cannot end its turn or begin another; other text gets the ids that transformers'
`apply_chat_template` gives it. To tell the two apart the template is rendered once more with every
content between characters that occur nowhere else.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer

from fastbrain.errors import InvalidConfig, InvalidDataset
from fastbrain.tokens.jinja_text import JinjaText
from fastbrain.tokens.segments import Marks, Segment, Targets, find_targets
from fastbrain.tokens.tokenizer_files import TokenizerFiles

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class Encoded(NamedTuple):
    """The ids of a conversation, and for each whether the model is to predict it."""

    ids: list[int]
    is_target: list[bool]


class ChatTemplate:
    """How conversations become text and ids for one tokenizer.

    Attributes:
        files: the tokenizer and its special tokens.
        template: the Jinja text.
        end_ids: ids after any of which a response has ended.
    """

    def __init__(self, files: TokenizerFiles, template: str | None = None) -> None:
        """`template`, or else the tokenizer's own, or else ChatML.

        Raises InvalidConfig for a template that is none or shows no messages, and for ChatML with
        a tokenizer that does not know its tokens.
        """
        self.files = files
        given = (template, files.chat_template, CHATML)
        self.template = next(each for each in given if each is not None)
        if not self.template.strip():
            raise InvalidConfig("the chat template is empty; give one that renders messages")
        if self.template == CHATML:
            _check_chatml(files)
        self._jinja = JinjaText(self.template)
        self._variables = {"eos_token": files.eos, "pad_token": files.pad}
        if files.bos is not None:
            self._variables["bos_token"] = files.bos
        self._check_shows_messages()
        self._tokens = _ControlTokens(files.tokenizer, self.template)
        self.end_ids = tuple(dict.fromkeys((*files.ends, *self._probed_ends())))

    def encode(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = False
    ) -> Encoded:
        """The ids of a conversation; with `add_generation_prompt` those a response is to follow.

        Targets are what the template's `{% generation %}` blocks hold, or where it has none the
        contents of the assistant's messages, each with the special token that ends it. A last
        response without one gets the end of text. A prompt for a response has no targets.

        Args:
            messages: each with a `role` and a `content`, both strings; what else is in them is
                not used.

        Raises InvalidDataset for messages that are none, and for what the template refuses.
        """
        segments = self._segments(messages, add_generation_prompt)
        if add_generation_prompt:
            return self._tokens.encode([replace(each, block=-1) for each in segments])
        targets = self._targets(segments)
        encoded = self._tokens.encode(targets.segments)
        if targets.needs_end:
            encoded.ids.append(self.files.eos_id)
            encoded.is_target.append(True)
        return encoded

    def marked(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation with what is learned between `[[` and `]]`, to be looked at.

        What could steer a terminal is spelled out. Raises as `encode` does.
        """
        targets = self._targets(self._segments(messages, False))
        pieces = [(each.text, each.block >= 0) for each in targets.segments]
        if targets.needs_end:
            pieces.append((self.files.eos, True))
        return marked_text(pieces)

    def _segments(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool
    ) -> list[Segment]:
        chat = [_checked(at, each, self._tokens.pattern) for at, each in enumerate(messages)]
        if not chat:
            raise InvalidDataset("the conversation has no messages")

        def render(contents: Sequence[str], generation: tuple[str, str] = ("", "")) -> str:
            said = [{**m, "content": c} for m, c in zip(chat, contents, strict=True)]
            return self._jinja.render(said, add_generation_prompt, self._variables, generation)

        contents = [each["content"] for each in chat]
        marks = Marks([self.template, *self._variables.values(), *contents])
        # looked at from inside, a mark is text: that it changed nothing else is checked
        with_blocks = render(contents, marks.generation)
        responses = None
        if not self._jinja.has_generation:
            responses = frozenset(at for at, m in enumerate(chat) if m["role"] == "assistant")
        elif marks.without_blocks(with_blocks) != render(contents):
            raise InvalidDataset("the chat template alters what its {% generation %} blocks hold")
        for mark in (marks.around, marks.inside):
            text = render([mark(at, c) for at, c in enumerate(contents)], marks.generation)
            if marks.without_contents(text) == with_blocks:
                break
        else:
            text = self._without_contents(contents, with_blocks)
        return marks.split(text, self._tokens.pattern, responses)

    def _without_contents(self, contents: Sequence[str], text: str) -> str:
        """`text`, in which contents are not marked, if it can be told what is what in it."""
        forged = [c for c in contents if self._tokens.pattern.search(c)]
        if forged or not self._jinja.has_generation:
            why = (
                "a message holds the text of a special token"
                if forged
                else "it has no {% generation %} blocks"
            )
            raise InvalidDataset(
                "the chat template alters the contents of messages, so it cannot be told which "
                f"part of its text is whose; and {why}"
            )
        return text

    def _targets(self, segments: Sequence[Segment]) -> Targets:
        bos = self.files.bos
        # some tokenizers begin and end a text with the same token
        return find_targets(segments, None if bos == self.files.eos else bos)

    def _check_shows_messages(self) -> None:
        texts = []
        for asked, answered in (("Who?", "Ishmael."), ("Yes?", "No.")):
            user = {"role": "user", "content": asked}
            said = [user, {"role": "assistant", "content": answered}]
            try:
                texts.append(self._jinja.render(said, False, self._variables))
            except InvalidDataset:
                return  # it wants other messages than these
        if texts[0] == texts[1]:
            raise InvalidConfig(
                "the chat template does not show what messages say: every conversation comes out "
                f"as {texts[0][:60]!r}; give a Jinja template that renders `messages`"
            )

    def _probed_ends(self) -> list[int]:
        user, said = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}
        for messages in ([user, said, user, said], [user, said]):
            try:
                found = self._targets(self._segments(messages, False))
            except InvalidDataset:
                continue
            return sorted(self._tokens.id(end) for end in found.ends)
        return []


class _ControlTokens:
    """A tokenizer that reads special tokens only where it is told to.

    Its special tokens count as plain text. Each has a double with an unguessable name, which
    stands in the text where the template means the token itself; so everything that a tokenizer
    does to a text is done to the whole of it.

    Attributes:
        pattern: finds the special tokens of a text.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        spec: dict[str, Any] = json.loads(tokenizer.to_str())
        tokens = [
            each
            for each in spec["added_tokens"]
            # what a template uses to tell turns apart is special whatever it is called
            if each["special"] or (each["content"].strip() and each["content"] in template)
        ]
        for each in tokens:
            each["special"] = True
        try:
            self._tokenizer = Tokenizer.from_str(json.dumps(spec))
        except Exception as error:  # the class that the package raises
            raise InvalidConfig(f"the tokenizer cannot be copied: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._ids: dict[str, int] = {each["content"]: each["id"] for each in tokens}
        # what the tokenizer has for letters that it does not know is no forgery
        unknown = spec["model"].get("unk_token"), spec["model"].get("unk_id")
        self._forgeable = {id for text, id in self._ids.items() if not {text, id} & {*unknown}}
        nonce = secrets.token_hex(16)
        self._doubles = {each: f"<|{nonce} {i}|>" for i, each in enumerate(self._ids)}
        self._tokenizer.add_tokens(
            [
                AddedToken(
                    self._doubles[each["content"]],
                    special=False,
                    **{key: each[key] for key in ("single_word", "lstrip", "rstrip", "normalized")},
                )
                for each in tokens
            ]
        )
        # the id that each id stands for
        self._originals = np.arange(1 + max(self._tokenizer.get_vocab().values()))
        for text, double in self._doubles.items():
            self._originals[self._tokenizer.token_to_id(double)] = self._ids[text]
        longest_first = sorted(self._ids, key=lambda text: (-len(text), text))
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def id(self, text: str) -> int:
        return self._ids[text]

    def encode(self, segments: Sequence[Segment]) -> Encoded:
        """Ids of the segments' text, targets where a token reaches into one with a block."""
        texts = [self._doubles[s.text] if s.is_control else s.text for s in segments]
        try:
            encoding = self._tokenizer.encode("".join(texts), add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidDataset("a message holds half of a surrogate pair") from error
        # flags[i + 1] is of character i
        flags = np.zeros(sum(map(len, texts)) + 2, np.int64)
        at = 1
        for segment, text in zip(segments, texts, strict=True):
            flags[at : at + len(text)] = segment.block >= 0
            at += len(text)
        first, end = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        before = flags.cumsum()
        # some tokenizers leave white space out of their offsets, and nothing of a token that is it
        inside = (first == end) & (flags[first] & flags[first + 1] > 0)
        is_target = (before[end] > before[first]) | inside
        found = np.array(encoding.ids, np.int64)
        ids = self._originals[found]
        is_double = ids != found
        controls = [s.block >= 0 for s in segments if s.is_control]
        self._check(found, int(is_double.sum()), len(controls))
        # a control token may have taken white space around it into its offsets
        is_target[is_double] = controls
        return Encoded(ids.tolist(), is_target.tolist())

    def _check(self, found: npt.NDArray[np.int64], doubles: int, controls: int) -> None:
        forged = self._forgeable.intersection(found.tolist())
        if forged:
            names = ", ".join(repr(text) for text, id in self._ids.items() if id in forged)
            raise InvalidDataset(
                f"the tokenizer reads {names} as a special token even where it is plain text"
            )
        if doubles != controls:
            raise InvalidDataset(
                f"the tokenizer finds {doubles} of the {controls} special tokens that the chat "
                "template puts"
            )


def marked_text(pieces: Sequence[tuple[str, bool]]) -> str:
    """Texts, each with whether it is learned, as one; learned ones between `[[` and `]]`."""
    out, inside = "", False
    for text, learned in pieces:
        if learned != inside:
            out += "[[" if learned else "]]"
            inside = learned
        out += "".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in text)
    return out + "]]" * inside


def _check_chatml(files: TokenizerFiles) -> None:
    for token in ("<|im_start|>", "<|im_end|>"):
        if files.tokenizer.token_to_id(token) is None:
            raise InvalidConfig(
                f"the tokenizer does not know {token}, which ChatML needs, and comes with no chat "
                "template of its own; give one that uses the tokens that it has"
            )


def _checked(at: int, message: Mapping[str, str], controls: re.Pattern[str]) -> dict[str, str]:
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise InvalidDataset(f"message {at} has no {key!r} that is a string")
    if controls.search(message["role"]):
        raise InvalidDataset(f"the role of message {at} holds a special token")
    return {"role": message["role"], "content": message["content"]}
