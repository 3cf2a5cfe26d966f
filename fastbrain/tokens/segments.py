"""A rendered conversation in pieces: what the template says, what messages say, what is learned."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fastbrain.errors import InvalidDataset

# characters that Unicode leaves to private agreements, in the order they are tried
_PRIVATE = range(0xE000, 0xF900)


@dataclass(frozen=True)
class Segment:
    """A stretch of a rendered conversation.

    Attributes:
        text: what it says.
        is_content: whether a message says it, and not the template.
        is_control: whether it is one of the template's special tokens.
        block: the number of the response that it belongs to, -1 for none.
    """

    text: str
    is_content: bool = False
    is_control: bool = False
    block: int = -1


class Marks:
    """Characters that occur in none of `texts`, put around contents and generation blocks."""

    def __init__(self, texts: Iterable[str]) -> None:
        used = set().union(*texts)
        free = (chr(code) for code in _PRIVATE if chr(code) not in used)
        try:
            self._open, self._middle, self._close, begin, end = (next(free) for _ in range(5))
        except (StopIteration, RuntimeError) as error:
            raise InvalidDataset(
                "the messages use all of Unicode's private characters from U+E000 on"
            ) from error
        self.generation = begin, end
        contents, blocks = f"{self._open}([0-9]+){self._middle}|{self._close}", f"{begin}|{end}"
        self._contents, self._blocks = re.compile(contents), re.compile(blocks)
        self._all = re.compile(f"{contents}|{blocks}")

    def around(self, index: int, content: str) -> str:
        """The content of message `index`, marked; an empty one stays empty."""
        return f"{self._open}{index}{self._middle}{content}{self._close}" if content else content

    def inside(self, index: int, content: str) -> str:
        """The same with the white space at both ends left outside, for a template that trims."""
        core = content.strip()
        lead = content[: len(content) - len(content.lstrip())] if core else content
        trail = content[len(content.rstrip()) :] if core else ""
        return lead + self.around(index, core) + trail

    def without_contents(self, text: str) -> str:
        """A text without the marks of contents."""
        return self._contents.sub("", text)

    def without_blocks(self, text: str) -> str:
        """A text without the marks of generation blocks."""
        return self._blocks.sub("", text)

    def split(
        self, text: str, controls: re.Pattern[str], responses: frozenset[int] | None
    ) -> list[Segment]:
        """A marked text in segments.

        `controls` finds special tokens in what the template says. A response is what a generation
        block has, or, where `responses` is given, the content of one of these messages.
        """
        found: list[Segment] = []
        owner, block, blocks, at = -1, -1, 0, 0
        for match in [*self._all.finditer(text), None]:
            piece = text[at : match.start() if match else len(text)]
            if owner >= 0:
                said = owner if responses is not None and owner in responses else block
                found.append(Segment(piece, is_content=True, block=said))
            else:
                found += _template_text(piece, controls, block)
            if match is None:
                break
            at = match.end()
            if match[1]:
                owner = int(match[1])
            elif match[0] == self._close:
                owner = -1
            elif responses is None:
                blocks += match[0] == self.generation[0]
                block = blocks - 1 if match[0] == self.generation[0] else -1
        return [segment for segment in found if segment.text]


def _template_text(text: str, controls: re.Pattern[str], block: int) -> Iterator[Segment]:
    at = 0
    for match in controls.finditer(text):
        yield Segment(text[at : match.start()], block=block)
        yield Segment(match[0], is_control=True, block=block)
        at = match.end()
    yield Segment(text[at:], block=block)


@dataclass(frozen=True)
class Targets:
    """Segments of which those with a block are to be learned, ends of responses included.

    Attributes:
        segments: the conversation.
        ends: the special tokens that end its responses.
        needs_end: whether the last response has none, so that the end of a text is to follow.
    """

    segments: list[Segment]
    ends: frozenset[str]
    needs_end: bool


def find_targets(segments: Sequence[Segment], bos: str | None) -> Targets:
    """Stretch every response over the special token that ends it.

    That is its own last token, or the template's next one if only white space lies between; not
    `bos`, with which something begins. The last response may lack one if nothing follows it.
    Raises InvalidDataset for another response that has none.
    """
    out, ends, needs_end = list(segments), set[str](), False
    last = {each.block: at for at, each in enumerate(out) if each.block >= 0}
    for block, at in last.items():
        end = at
        while end >= 0 and out[end].block == block and not out[end].text.strip():
            end -= 1
        if end >= 0 and out[end].block == block and out[end].is_control:
            ends.add(out[end].text)
            continue
        end = at + 1
        while end < len(out) and not out[end].is_content and not out[end].text.strip():
            end += 1
        ended = end < len(out) and out[end].is_control and out[end].text != bos
        if end < len(out) and not ended:
            raise InvalidDataset(
                "the chat template puts no special token after a response, so a model would not "
                f"learn to stop: {out[end].text[:40]!r} follows; end each response with a special "
                "token of the tokenizer, inside its {% generation %} block if it has one"
            )
        for each in range(at + 1, min(end + 1, len(out))):
            out[each] = replace(out[each], block=block)
        if ended:
            ends.add(out[end].text)
        else:
            needs_end = True
    return Targets(out, frozenset(ends), needs_end)
