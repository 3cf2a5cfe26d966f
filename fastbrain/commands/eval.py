"""`fastbrain eval`: how well a model predicts a text, token by token."""

import argparse
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbrain.commands import generate_options
from fastbrain.commands.generate_options import at_least
from fastbrain.errors import SequenceTooLong
from fastbrain.training import manifest, run_dir
from fastbrain.training.command import DONE
from fastbrain.training.run_dir import RunDir
from fastbrain.training.settings import Settings

if TYPE_CHECKING:
    from fastbrain.commands.eval_windows import Scored
    from fastbrain.lm import TransformerLm

_EPILOG = """example:
  fastbrain eval runs/first corpus.txt
  fastbrain eval runs/first corpus.txt --every-token --seq-len 128 --json
  fastbrain eval runs/first runs/first/data/train.bin --max-tokens 100000

(for a run at runs/first that learned from corpus.txt.) DATA is text as for `fastbrain prepare`, or
a token file (.bin). Windows lie side by side, and the first token of each is only read. With
--every-token they overlap by one and the last is short: each token but the first is predicted once,
and the bits per byte are exact. A token that ends a document is predicted too, and has no bytes.
Exit codes: 0 done; 2 refused; 130 interrupted."""

_SEQ_LEN = 1_024  # where the model could do more, and no run says what it learned with
_CPU_TOKENS, _CUDA_TOKENS = 4_096, 32_768  # of a batch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `eval`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    generate_options.add_model_arguments(parser)
    parser.add_argument("data", metavar="DATA", help="text, JSON lines, a folder, or a .bin")
    parser.add_argument("--field", default="text", help="of JSON lines: where the text is (text)")
    parser.add_argument(
        "--seq-len",
        type=int,
        metavar="N",
        help=f"tokens of a window (a run's data.seq_len; else max_seq_len, at most {_SEQ_LEN:,})",
    )
    parser.add_argument("--batch", type=int, metavar="N", help="windows at a time (by the device)")
    parser.add_argument("--every-token", action="store_true", help="predict all but the first")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of the data: the first N")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the text")


def run(options: argparse.Namespace) -> int:
    """Evaluate what the options name and print it; returns the exit code."""
    return generate_options.refusing(_evaluate, options)


def _evaluate(options: argparse.Namespace) -> int:
    from fastbrain.commands import eval_data, eval_windows
    from fastbrain.tokens.progress import Progress

    for name, low in (("seq_len", 2), ("batch", 1), ("max_tokens", 2)):
        if (value := getattr(options, name)) is not None:
            at_least(low, "--" + name.replace("_", "-"), value)
    found = generate_options.opened(options)
    model = found.model
    with eval_data.opened(Path(options.data), found.files, options.field, options.max_tokens) as (
        tokens,
        text_bytes,
    ):
        count = tokens.tokens()
        seq_len = _seq_len(options, model, count)
        most = _CUDA_TOKENS if model.on_device() else _CPU_TOKENS
        batch = options.batch or max(most // seq_len, 1)
        began = time.perf_counter()
        with Progress("eval", 4 * count) as shown:
            scored = eval_windows.scored(
                model,
                tokens,
                batch,
                seq_len,
                options.every_token,
                lambda read: shown.update(4 * read, read),
            )
        seconds = time.perf_counter() - began
    document = {
        "model": found.source,
        "data": options.data,
        "loss": scored.loss,
        "perplexity": scored.perplexity(),
        "bits_per_byte": _bits_per_byte(scored, count, text_bytes, options.every_token),
        "tokens_scored": scored.predicted,
        "tokens": count,
        "text_bytes": text_bytes,
        "seq_len": seq_len,
        "every_token": options.every_token,
        "seconds": round(seconds, 3),
    }
    if options.json:
        # infinity and not-a-number are no JSON
        safe = {k: None if _is_wild(value) else value for k, value in document.items()}
        print(json.dumps(safe, indent=1))
    else:
        print("\n".join(_lines(document)))
    return DONE


def _seq_len(options: argparse.Namespace, model: "TransformerLm", count: int) -> int:
    most: int = model.config.max_seq_len
    if options.seq_len is not None:
        if options.seq_len > most:
            raise SequenceTooLong(options.seq_len, most)
        return int(options.seq_len)
    usual = _trained_seq_len(Path(options.model)) or _SEQ_LEN
    # a text shorter than a window is a window
    return max(min(usual, most, count), 2)


def _trained_seq_len(path: Path) -> int | None:
    """The data.seq_len of a run, or of the run that a checkpoint is of; None for other models."""
    if run_dir.exists(path):
        return Settings.from_tables(RunDir.open(path).tables).data.seq_len
    state = path / "trainer_state.json"
    if not state.is_file():
        return None
    found = manifest.document(state).get("config")
    data = found.get("data") if isinstance(found, dict) else None
    seq_len = data.get("seq_len") if isinstance(data, dict) else None
    return seq_len if isinstance(seq_len, int) and seq_len > 1 else None


def _bits_per_byte(
    scored: "Scored", tokens: int, text_bytes: int | None, every_token: bool
) -> float | None:
    if not text_bytes:
        return None
    # side by side, what was not predicted is taken to be like what was
    counted = scored.predicted if every_token else tokens
    return scored.loss / math.log(2) * counted / text_bytes


def _is_wild(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _lines(found: dict[str, Any]) -> list[str]:
    bits = found["bits_per_byte"]
    speed = found["tokens"] / max(found["seconds"], 1e-3)
    walk = "overlapping windows" if found["every_token"] else "windows"
    rows = {
        "model": found["model"],
        "data": f"{found['data']}, {found['tokens']:,} tokens",
        "loss": f"{found['loss']:.4f} nats a token",
        "perplexity": f"{found['perplexity']:.2f}",
        "bits per byte": "not known: nothing tells the bytes" if bits is None else f"{bits:.4f}",
        "tokens scored": f"{found['tokens_scored']:,}, in {walk} of {found['seq_len']:,}",
        "seconds": f"{found['seconds']:.1f} ({speed:,.0f} tokens/s)",
    }
    return [f"{label:15}{value}" for label, value in rows.items()]
