"""What a model is worth at a step: its loss on held-out text, and texts that it writes itself.

Neither changes any state of a run, and there is no generator to share: samples draw from one of
their own, seeded by the run.
"""

import math
from pathlib import Path
from typing import NamedTuple

from fastbrain import atomic
from fastbrain.lm import TransformerLm
from fastbrain.sampler import Sampler
from fastbrain.training.data import Corpus

PROMPT_TOKENS, NEW_TOKENS = 16, 64
TEMPERATURE, TOP_P = 0.8, 0.95


class Score(NamedTuple):
    """A held-out loss in nats a token, and in bits a byte where the text is known."""

    loss: float
    bits_per_byte: float | None

    @property
    def perplexity(self) -> float:
        """e to the loss; infinity where that is too large for a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


def score(model: TransformerLm, corpus: Corpus, sequences: int, seq_len: int) -> Score:
    """Token-weighted loss over the held-out text, `sequences` windows at once."""
    loss = float(model.evaluate_file(corpus.held_out, sequences, seq_len).lm_loss)
    density = corpus.bytes_per_token
    return Score(loss, loss / math.log(2) / density if density else None)


def write_samples(
    model: TransformerLm, corpus: Corpus, count: int, seed: int, path: Path
) -> str | None:
    """Continue `count` beginnings from the held-out text and write them to `path`.

    Returns the first one in one line, or None when `count` is 0. Ids stand for the text where
    there is no tokenizer.
    """
    if count == 0:
        return None
    room = min(model.config.max_seq_len, corpus.held_out.tokens())
    prompt_tokens = min(PROMPT_TOKENS, room // 2)
    last = corpus.held_out.tokens() - prompt_tokens
    starts = [last * index // max(count - 1, 1) for index in range(count)]
    prompts = [corpus.held_out.read(start, prompt_tokens).tolist() for start in starts]
    new_tokens = min(NEW_TOKENS, model.config.max_seq_len - prompt_tokens)
    texts = []
    for index, prompt in enumerate(prompts):
        sampler = Sampler.temperature(TEMPERATURE, seed + index).top_p(TOP_P)
        ids = model.generate(prompt, new_tokens, sampler)
        texts.append((corpus.text(prompt), corpus.text(ids)))
    blocks = [f"[{prompt}]{text}" for prompt, text in texts]
    atomic.write_bytes(path, ("\n\n---\n\n".join(blocks) + "\n").encode("utf-8", "replace"))
    return "".join(each for each in " ".join(blocks[0].split()) if each.isprintable())
