"""What a model is worth at a step: its loss on held-out text, and texts that it writes itself.

Neither changes any state of a run, and there is no generator to share: samples draw from one of
their own, seeded by the run.
"""

import math
from pathlib import Path
from typing import NamedTuple

from fastbrain import atomic
from fastbrain.lm import TransformerLm
from fastbrain.losses import summed_losses
from fastbrain.parallel.ranks import Ranks
from fastbrain.sampler import Sampler
from fastbrain.training.corpus import Corpus

NEW_TOKENS = 64
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


def score(model: TransformerLm, corpus: Corpus, sequences: int, ranks: Ranks) -> Score:
    """Token-weighted loss over what is held out, `sequences` rows at once, shared by the ranks."""
    batches = list(corpus.held_out_batches(sequences))
    own = batches[ranks.rank :: ranks.size]
    if len(own) < -(-len(batches) // ranks.size):
        # others have one more, and a model in parts is gathered by all ranks or none
        model.evaluate(batches[0])
    found = summed_losses(model.evaluate, own, ranks.add)
    assert found is not None  # a run begins only with a row to score
    loss, density = float(found.lm_loss), corpus.bytes_per_token
    return Score(loss, loss / math.log(2) / density if density else None)


def write_samples(
    model: TransformerLm, corpus: Corpus, count: int, seed: int, path: Path
) -> str | None:
    """Continue `count` beginnings of what is held out and write them to `path`.

    Returns the first one in one line, or None when there is none. Ids stand for the text where
    there is no tokenizer.
    """
    max_seq_len = model.config.max_seq_len
    prompts = corpus.prompts(count, max_seq_len // 2)
    if not prompts:
        return None
    texts = []
    for index, prompt in enumerate(prompts):
        sampler = Sampler.temperature(TEMPERATURE, seed + index).top_p(TOP_P)
        new_tokens = min(NEW_TOKENS, max_seq_len - len(prompt))
        ids = model.generate(prompt, new_tokens, sampler, stop=corpus.ends)
        texts.append((corpus.text(prompt), corpus.text(ids)))
    blocks = [f"[{prompt}]{text}" for prompt, text in texts]
    atomic.write_bytes(path, ("\n\n---\n\n".join(blocks) + "\n").encode("utf-8", "replace"))
    return "".join(each for each in " ".join(blocks[0].split()) if each.isprintable())
