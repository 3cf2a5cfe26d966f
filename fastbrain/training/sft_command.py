"""The command line of `sft`: a training run on instructions that begins from another model."""

import argparse
import json

from fastbrain.errors import InvalidConfig
from fastbrain.training.command import RUN, Request, add_common_arguments, train_request
from fastbrain.training.progress import Console

_CONFIG = "sft"
# adapters are few and begin at zero, so they take larger steps
_LORA_RATE = "train.learning_rate=2e-4"

_EPILOG = """example:
  fastbrain sft runs/first answers.jsonl --run runs/answers
  fastbrain sft runs/first answers.jsonl --run runs/adapted --lora-rank 8 data.seq_len=256
  fastbrain chat runs/answers

MODEL is a run, a checkpoint, a Hugging Face directory, a .rbw or a .gguf file. A line of DATA is
one of
  {"prompt": "...", "response": "..."}            also "completion"
  {"messages": [{"role": "user", "content": "..."},
                {"role": "assistant", "content": "..."}]}
  {"instruction": "...", "input": "...", "output": "..."}
  {"conversations": [{"from": "human", "value": "..."},
                     {"from": "gpt", "value": "..."}]}
  {"input_ids": [...], "labels": [...]}
Only the responses, and the token that ends each, are learned. What it leaves is a run like any
other: `resume`, `pause`, `verify` and `report` take it, and the exit codes are those of `train`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `sft`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("model", metavar="MODEL", help="what to begin from")
    parser.add_argument("data", metavar="DATA", help="JSON lines, or a folder of them")
    add_common_arguments(parser)
    parser.add_argument(*RUN, metavar="DIR", help="the run's directory (runs/sft)")
    parser.add_argument(
        "--resume", choices=["auto"], help="go on with the run in DIR if there is one"
    )
    parser.add_argument("--config", default=_CONFIG, help="TOML file with other settings (sft)")
    parser.add_argument("--validation", metavar="DATA", help="held out (else 5 %% of the rows)")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json (the model's own)")
    parser.add_argument("--epochs", type=int, help="times that every row is read (3)")
    parser.add_argument("--template", metavar="FILE", help="Jinja chat template (the model's own)")
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave bad examples out, counted, and go on"
    )
    parser.add_argument("--lora-rank", type=int, help="train adapters of this rank alone")
    parser.add_argument("--lora-alpha", type=float, help="their strength (the rank)")
    parser.add_argument("--lora-seed", type=int, help="of their initial values (0)")
    parser.set_defaults(request=_request)


def _request(options: argparse.Namespace, console: Console) -> Request:
    lora = {
        name: getattr(options, f"lora_{name}")
        for name in ("rank", "alpha", "seed")
        if getattr(options, f"lora_{name}") is not None
    }
    if lora and "rank" not in lora:
        raise InvalidConfig(f"--lora-{min(lora)} is of adapters: give --lora-rank as well")
    named = {
        "data.kind": "instructions",
        "train.init": options.model,
        "data.train": options.data,
        "data.validation": options.validation,
        "data.tokenizer": options.tokenizer,
        "data.template": options.template,
        "train.epochs": options.epochs,
        "data.skip_bad": options.skip_bad or None,
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    if lora:
        table = ", ".join(f"{key} = {value}" for key, value in lora.items())
        overrides.append(f"model.lora={{ {table} }}")
        if options.config == _CONFIG:
            overrides.append(_LORA_RATE)
    options.overrides = [*overrides, *options.overrides]
    return train_request(options, console)
