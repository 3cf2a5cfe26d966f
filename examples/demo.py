"""A language model from text to answers, on a CPU, with all that a long run needs.

It trains on the prose behind Python's `help()` and leaves a checkpoint half-way. A new process
resumes from there, and has to end with the very bits of the run that was not interrupted. The
model then continues a few words, and is fine-tuned until it answers a few questions.

A run of weeks differs in the size of the model and of the text, and in two calls before training:
`model.set_mixed_precision(True)` and `model.to_cuda(0, 9_000)`.

    python examples/demo.py [--out DIR]
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from demo_text import QUESTIONS, STARTS, documents
from tokenizers import Tokenizer

from fastbrain import Optimizer, Precision, Sampler, Schedule, TokenBatch, TokenFile, TransformerLm
from fastbrain.tokens.prepare import train_tokenizer

SEED = 42
SEQ_LEN = 48
MICRO_BATCH = 6  # sequences
ACCUMULATE = 2  # micro-batches to a step
END_OF_TEXT = 0  # the id that train_tokenizer gives it


@dataclass(frozen=True)
class Size:
    """What makes the difference between the demo and its test."""

    vocab_size: int
    d_model: int
    steps: int  # a multiple of 8, as there are 8 reports


FULL = Size(vocab_size=2048, d_model=128, steps=800)
QUICK = Size(vocab_size=512, d_model=32, steps=16)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, resume, sample and fine-tune a model.")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where the files go")
    parser.add_argument("--quick", action="store_true", help="a toy, to see whether all works")
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    out, size = options.out, QUICK if options.quick else FULL
    # a second thread gains little on a model so small, and loses much on a busy machine
    torch.set_num_threads(1)
    if options.resume:
        resume(out, size)
    else:
        demonstrate(out, size)


def demonstrate(out: Path, size: Size) -> None:
    """The whole way, whose files go to the directory `out`."""
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenize(out, size)
    model = build(tokenizer, size)
    print(model.parameter_counts())
    losses = train(model, out, "live", size)

    print(f"\nresuming from the step-{size.steps // 2} checkpoint in a new process", flush=True)
    if subprocess.run([sys.executable, *sys.argv, "--resume"]).returncode:
        sys.exit("the new process failed")
    compare(out)

    continue_text(model, tokenizer)
    fine_tune(model, tokenizer)
    model.save_bin(out / "answers.rbw", Precision.Q8)

    print(
        f"\nIn {time.monotonic() - start:.0f} s the held-out loss fell from {losses[0]:.2f} to "
        f"{losses[size.steps]:.2f}, the resume was exact, and all answers are right.\n"
        f"The files are in {out}. Next, a larger model, of this text or of yours:\n\n"
        f"  {os.path.relpath(sys.executable)} -m fastbrain.train tiny-cpu "
        f"data.train={out / 'train.jsonl'}"
    )


def tokenize(out: Path, size: Size) -> Tokenizer:
    """Text to token files, once; every tenth topic is held out."""
    texts = documents()
    held_out = texts[1::10]
    parts = {"train": [text for text in texts if text not in held_out], "held-out": held_out}
    tokenizer = train_tokenizer(parts["train"], size.vocab_size)
    tokenizer.save(str(out / "tokenizer.json"))
    print(f"vocabulary {tokenizer.get_vocab_size()}", end="")
    for name, part in parts.items():
        jsonl = out / f"{name}.jsonl"
        jsonl.write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
        count = TokenFile.write_jsonl(out / f"{name}.bin", jsonl, "text", END_OF_TEXT, tokenizer)
        print(f", {count:,} {name} tokens", end="")
    print()
    return tokenizer


def build(tokenizer: Tokenizer, size: Size) -> TransformerLm:
    """A dense layer, then a mixture of four experts, of which each token visits two."""
    return (
        TransformerLm.builder()
        .vocab_size(tokenizer.get_vocab_size())
        .d_model(size.d_model)
        .n_layers(2)
        .heads(4, 2, size.d_model // 4)
        .d_ff(size.d_model * 11 // 4)
        .moe_d_ff(size.d_model)
        .experts(4, 2)
        .moe_layers(range(1, 2))
        .shared_expert(True)
        .max_seq_len(2 * SEQ_LEN)
        .optimizer(Optimizer.adam(3e-3, betas=(0.9, 0.95), weight_decay=0.1))
        .seed(SEED)
        .build()
    )


def train(model: TransformerLm, out: Path, run: str, size: Size) -> dict[int, float]:
    """Goes on from the model's step to the last, and leaves a checkpoint named after the run.

    Returns the held-out loss at each step that was reported; they are in `<run>.json`, too.
    """
    corpus = TokenFile.open(out / "train.bin", SEED)
    held_out = TokenFile.open(out / "held-out.bin", SEED)
    schedule = Schedule.warmup_cosine(3e-3, size.steps // 20, size.steps)

    def evaluate() -> float:
        return float(model.evaluate_file(held_out, 16, SEQ_LEN).lm_loss)

    first = model.optimizer_step()
    losses = {first: evaluate()}
    print(f"\n step      lr     train    held-out\n{first:5} {losses[first]:29.4f}", flush=True)
    for step in range(first, size.steps):
        model.set_learning_rate(schedule.rate(step))
        model.zero_grad()
        train_loss = torch.zeros(())
        for part in range(ACCUMULATE):
            batch = corpus.batch(step * ACCUMULATE + part, MICRO_BATCH, SEQ_LEN)
            train_loss += model.accumulate_step(batch).lm_loss / ACCUMULATE
        model.step_clipped(1 / ACCUMULATE, 1.0)

        done = step + 1
        if done % (size.steps // 8) == 0:
            losses[done], rate = evaluate(), model.learning_rate()
            print(f"{done:5} {rate:7.5f} {train_loss:9.4f} {losses[done]:11.4f}", flush=True)
        if done == size.steps // 2:
            checkpoint(model, out / "middle.rbw")

    checkpoint(model, out / f"{run}.rbw")
    (out / f"{run}.json").write_text(json.dumps({at: loss.hex() for at, loss in losses.items()}))
    return losses


def checkpoint(model: TransformerLm, path: Path) -> None:
    """All that a resumed run needs: weights and step counter, and the moments beside them."""
    model.save_bin(path, Precision.F32)
    model.save_optimizer_state(f"{path}.opt")


def resume(out: Path, size: Size) -> None:
    """What the new process does."""
    model = TransformerLm.load_bin(out / "middle.rbw")
    model.load_optimizer_state(out / "middle.rbw.opt")
    print(f"optimizer step counter restored: {model.optimizer_step()}")
    train(model, out, "resumed", size)


def compare(out: Path) -> None:
    """Ends the program unless the resumed run and the live one agree to the last bit."""
    live, resumed = facts(out, "live"), facts(out, "resumed")
    print()
    for what, found in resumed.items():
        print(f"  {what:17} {found}  {'the same' if found == live[what] else f'NOT {live[what]}'}")
    if any(found != live[what] for what, found in resumed.items()):
        sys.exit("the resumed run is not the one that was not interrupted")


def facts(out: Path, run: str) -> dict[str, str]:
    """The exact held-out losses of a run, and digests of the weights and moments it ended with."""
    losses = json.loads((out / f"{run}.json").read_text())
    found = {f"loss at step {step}": loss for step, loss in losses.items()}
    for what, suffix in (("final weights", ".rbw"), ("final moments", ".rbw.opt")):
        found[what] = hashlib.sha256((out / f"{run}{suffix}").read_bytes()).hexdigest()[:20]
    return found


def continue_text(model: TransformerLm, tokenizer: Tokenizer) -> None:
    """Samples, since no loss tells whether they read like text."""
    print("\nwhat the model makes of a few words")
    for seed, start in enumerate(STARTS):
        sampler = Sampler.temperature(0.8, seed).top_k(40)
        ids = model.generate(tokenizer.encode(start).ids, SEQ_LEN, sampler, stop=[END_OF_TEXT])
        print(textwrap.indent(textwrap.fill(start + tokenizer.decode(ids), 90), "  "), end="\n\n")


def fine_tune(model: TransformerLm, tokenizer: Tokenizer) -> None:
    """Trains on the answers alone, until each is given word for word and ended."""
    prompts = [tokenizer.encode(f"Q: {question}\nA:").ids for question in QUESTIONS]
    # a token begins with the space before its word, so that belongs to the answer
    answers = [[*tokenizer.encode(f" {text}").ids, END_OF_TEXT] for text in QUESTIONS.values()]
    batch = TokenBatch.supervised(zip(prompts, answers, strict=True))
    model.set_learning_rate(1e-3)
    for step in range(1, 301):
        model.train_step_batch(batch)
        if step % 10 == 0:
            said = model.generate_batch(prompts, 40, Sampler.greedy(), stop=[END_OF_TEXT])
            if said == answers:
                break
    else:
        sys.exit(f"after {step} steps the answers are still {tokenizer.decode_batch(said)}")
    print(f"fine-tuned for {step} steps, it answers")
    for prompt, ids in zip(prompts, said, strict=True):
        print(textwrap.indent(tokenizer.decode(prompt) + tokenizer.decode(ids), "  "))


if __name__ == "__main__":
    main()
