"""`fastbrain export`: a model for other programs, as a Hugging Face directory, .rbw or .gguf."""

import argparse
import importlib.util
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastbrain.commands.generate_options import note, refusing
from fastbrain.errors import InvalidConfig
from fastbrain.training.command import DONE, FAILED

if TYPE_CHECKING:
    from fastbrain.training.pretrained import Pretrained

_EPILOG = """example:
  fastbrain export hf runs/first exported
  fastbrain export rbw runs/first model.rbw --with-optimizer
  fastbrain export gguf runs/first model.gguf --precision q8_0

(for a run at runs/first.) `fastbrain export hf --help` says more, and so do the other two.
Exit codes: 0 exported; 1 exported, and the check found a difference; 2 refused."""

_HF_EPILOG = """example:
  fastbrain export hf runs/first exported
  fastbrain export hf runs/first exported --arch qwen2_moe --dtype bfloat16 --force

(for a run at runs/first.) A dense model becomes a llama, a mixture of experts an ernie4_5_moe.
Where transformers is installed, what was written is loaded with it and compared."""

_RBW_EPILOG = """example:
  fastbrain export rbw runs/first model.rbw
  fastbrain export rbw runs/first model.rbw --with-optimizer --force

(for a run at runs/first.) The crate rusting_brain loads the file, and `load_bin`. The optimizer's
moments and counter are written to model.opt, beside it."""

_GGUF_EPILOG = """example:
  fastbrain export gguf runs/first model.gguf
  fastbrain export gguf runs/first model.gguf --precision q8_0 --force

(for a run at runs/first.) llama.cpp, and what is built on it, loads the file."""


class Exported(NamedTuple):
    """What was written: its place, its files, and what else a reader should know of it."""

    path: Path
    files: list[Path]
    facts: dict[str, Any]
    lines: list[str]
    agrees: bool = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `export`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    kinds = parser.add_subparsers(metavar="hf|rbw|gguf", required=True)
    hf = _kind(kinds, "hf", "a Hugging Face directory", _HF_EPILOG)
    hf.add_argument(
        "--arch",
        choices=["auto", "llama", "ernie4_5_moe", "qwen2_moe"],
        default="auto",
        help="class of transformers (auto: llama for a dense model, else ernie4_5_moe)",
    )
    hf.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="(float32)")
    hf.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="load it with transformers and compare (where transformers is installed)",
    )
    rbw = _kind(kinds, "rbw", "a weights file of the crate rusting_brain", _RBW_EPILOG)
    rbw.add_argument("--precision", choices=["f32", "q8"], default="f32", help="(f32)")
    rbw.add_argument(
        "--with-optimizer",
        action="store_true",
        help="of a run or checkpoint: write the optimizer's state as well",
    )
    gguf = _kind(kinds, "gguf", "a file of llama.cpp", _GGUF_EPILOG)
    gguf.add_argument("--precision", choices=["f32", "bf16", "q8_0"], default="f32", help="(f32)")


def run(options: argparse.Namespace) -> int:
    """Export what the options ask for; returns the exit code."""
    return refusing(_export, options)


def _kind(
    kinds: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    what: str,
    epilog: str,
) -> argparse.ArgumentParser:
    parser = kinds.add_parser(
        name,
        help=what,
        description=f"Export a model as {what}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(kind=name)
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a run, a checkpoint, a Hugging Face directory, a .rbw or a .gguf file",
    )
    parser.add_argument("out", metavar="OUT", help="what to write")
    parser.add_argument("--step", type=int, metavar="N", help="of a run: the checkpoint of step N")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json, if not the model's")
    parser.add_argument("--force", action="store_true", help="replace what is at OUT")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the text")
    return parser


def _export(options: argparse.Namespace) -> int:
    from fastbrain.training.pretrained import open_pretrained

    began = time.perf_counter()
    _refuse_early(options)
    opened = open_pretrained(options.source, options.tokenizer, options.step)
    merged = opened.model.config.lora is not None
    if merged:
        if options.kind == "rbw" and options.with_optimizer:
            raise InvalidConfig(
                "--with-optimizer: the moments of this model are its adapters', which are merged "
                "into the weights on export; leave it out"
            )
        opened.model.merge_lora()
    exported = {"hf": _hf, "rbw": _rbw, "gguf": _gguf}[options.kind](options, opened)
    size = sum(file.stat().st_size for file in exported.files)
    document = {
        "source": opened.source,
        "out": str(exported.path),
        "kind": options.kind,
        "files": [str(file) for file in exported.files],
        "bytes": size,
        "adapters_merged": merged,
        **exported.facts,
        "seconds": round(time.perf_counter() - began, 3),
    }
    if options.json:
        print(json.dumps(document))
    else:
        print(f"read      {opened.source}" + (", its adapters merged" if merged else ""))
        count = "1 file" if len(exported.files) == 1 else f"{len(exported.files)} files"
        print(f"written   {exported.path}: {count}, {size:,} bytes")
        print("\n".join(exported.lines))
    return DONE if exported.agrees else FAILED


def _refuse_early(options: argparse.Namespace) -> None:
    """Refuse what can be refused before a model is read."""
    out = Path(options.out)
    if options.kind == "hf":
        if options.check and not _has_transformers():
            raise InvalidConfig(
                "--check needs transformers, which is not installed: `pip install fastbrain[hf]`, "
                "or leave it out"
            )
    elif out.suffix != f".{options.kind}":
        raise InvalidConfig(f"{out} must end in .{options.kind}, by which readers know it")
    targets = [out]
    if options.kind == "rbw" and options.with_optimizer:
        targets.append(out.with_suffix(".opt"))
    for target in targets:
        if os.path.lexists(target) and not options.force:
            raise InvalidConfig(f"{target} exists already; add --force, or choose another name")
    if not out.absolute().parent.is_dir():
        raise InvalidConfig(f"there is no directory {out.absolute().parent} to write into")


def _hf(options: argparse.Namespace, opened: "Pretrained") -> Exported:
    from fastbrain.formats.hf_export import resolved, write_directory

    model = opened.model
    arch = resolved(model.config, options.arch)
    path = write_directory(
        options.out,
        model.config,
        model.weights(),
        arch=arch,
        dtype=options.dtype,
        files=opened.files,
        force=options.force,
    )
    lines = [f"as        {arch}, {options.dtype}"]
    if opened.files is None:
        lines.append("there is no tokenizer in it: none is beside the model (see --tokenizer)")
    facts: dict[str, Any] = {"arch": arch, "dtype": options.dtype, "check": None}
    agrees = True
    if options.check is not False and _has_transformers():
        from fastbrain.commands.export_check import check

        found = check(path, model, options.dtype)
        facts["check"], agrees = found.document(), found.agrees
        lines.append(f"checked   {found.words()}")
    elif options.check is None:
        lines.append("not checked: transformers is not installed (pip install fastbrain[hf])")
    return Exported(path, sorted(path.iterdir()), facts, lines, agrees)


def _rbw(options: argparse.Namespace, opened: "Pretrained") -> Exported:
    from fastbrain.commands.export_optimizer import remove, restore
    from fastbrain.precision import Precision

    path = Path(options.out)
    beside = path.with_suffix(".opt")
    lines, files = [f"as        {options.precision.upper()}"], [path]
    if options.with_optimizer:
        restore(opened)
        # killed anywhere, it leaves no state beside weights that it does not belong to
        remove(beside)
    elif beside.exists():
        note(f"{beside} was left as it is; it belongs to another export")
    opened.model.save_bin(path, Precision(options.precision.upper()))
    if options.with_optimizer:
        opened.model.save_optimizer_state(beside)
        files.append(beside)
        updates = opened.model.optimizer_step()
        lines.append(f"          with the optimizer's state, {updates:,} updates")
    return Exported(path, files, {"precision": options.precision}, lines)


def _gguf(options: argparse.Namespace, opened: "Pretrained") -> Exported:
    from fastbrain.formats.gguf_write import write_gguf

    path = Path(options.out)
    write_gguf(
        path,
        opened.model.config,
        opened.model.weights(),
        precision=options.precision,
        files=opened.files,
        name=path.stem,
        force=options.force,
    )
    lines = [f"as        {options.precision}"]
    if opened.files is None:
        lines.append("there is no tokenizer in it: none is beside the model (see --tokenizer)")
    return Exported(path, [path], {"precision": options.precision}, lines)


def _has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None
