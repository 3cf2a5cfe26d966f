"""`fastbrain import`: a model of another program, as a file or a directory of our own."""

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbrain.commands.generate_options import note, refusing
from fastbrain.errors import InvalidConfig
from fastbrain.training.command import DONE

if TYPE_CHECKING:
    from fastbrain.training.pretrained import Pretrained

_EPILOG = """example:
  fastbrain import downloaded/SmolLM2-135M imported
  fastbrain generate imported --prompt "Once upon a time"

(for a directory at downloaded/SmolLM2-135M of a llama, an ernie4_5_moe or a qwen2_moe.) A .gguf or
a .rbw file is imported alike. An OUT that ends in .rbw becomes a file of the crate rusting_brain,
any other a directory in FP32 with tokenizer and chat template, from which a run may begin.
Exit codes: 0 imported; 2 refused."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `import`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "source", metavar="SOURCE", help="a Hugging Face directory, a .gguf or a .rbw file"
    )
    parser.add_argument("out", metavar="OUT", help="a name ending in .rbw, or a directory")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json, if not the model's")
    parser.add_argument("--force", action="store_true", help="replace what is at OUT")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the text")


def run(options: argparse.Namespace) -> int:
    """Import what the options name; returns the exit code."""
    return refusing(_import, options)


def _import(options: argparse.Namespace) -> int:
    from fastbrain.training.pretrained import open_pretrained

    began = time.perf_counter()
    out = Path(options.out)
    if os.path.lexists(out) and not options.force:
        raise InvalidConfig(f"{out} exists already; add --force, or choose another name")
    if not out.absolute().parent.is_dir():
        raise InvalidConfig(f"there is no directory {out.absolute().parent} to write into")
    if out.suffix in (".gguf", ".safetensors", ".bin", ".json"):
        raise InvalidConfig(
            f"{out} would be a directory with the name of a file; leave {out.suffix} away, or end "
            "in .rbw for a file"
        )
    opened = open_pretrained(options.source, options.tokenizer)
    merged = opened.model.config.lora is not None
    if merged:
        opened.model.merge_lora()
    files = _weights_file(out, opened) if out.suffix == ".rbw" else _directory(options, opened)
    moments = Path(options.source).with_suffix(".opt")
    if Path(options.source).suffix == ".rbw" and moments.exists():
        note(f"{moments} was left out: a model is imported without its optimizer's state")
    size = sum(file.stat().st_size for file in files)
    counts = opened.model.parameter_counts()
    if options.json:
        document: dict[str, Any] = {
            "source": opened.source,
            "out": str(out),
            "files": [str(file) for file in files],
            "bytes": size,
            "parameters": counts.total,
            "tokenizer": opened.files is not None,
            "adapters_merged": merged,
            "seconds": round(time.perf_counter() - began, 3),
        }
        print(json.dumps(document))
    else:
        print(f"read      {opened.source}" + (", its adapters merged" if merged else ""))
        print(f"          {counts}")
        count = "1 file" if len(files) == 1 else f"{len(files)} files"
        print(f"written   {out}: {count}, {size:,} bytes")
    return DONE


def _weights_file(out: Path, opened: "Pretrained") -> list[Path]:
    from fastbrain.optim import Optimizer

    opened.model.optimizer = Optimizer.adam(3e-4)
    opened.model.set_optimizer_step(0)
    opened.model.save_bin(out)
    if opened.files is not None:
        note("a .rbw file has no place for the tokenizer: give it with --tokenizer later")
    return [out]


def _directory(options: argparse.Namespace, opened: "Pretrained") -> list[Path]:
    from fastbrain.formats.hf_export import write_directory

    if opened.files is None:
        note(f"there is no tokenizer beside {options.source}, so there is none in {options.out}")
    path = write_directory(
        options.out,
        opened.model.config,
        opened.model.weights(),
        arch="own",
        files=opened.files,
        force=options.force,
    )
    return sorted(path.iterdir())
