"""Any model that fastbrain can read, opened by its path, with its tokenizer where it has one."""

from pathlib import Path
from typing import NamedTuple

from fastbrain import atomic
from fastbrain.errors import FastBrainError, InvalidConfig, InvalidSnapshot
from fastbrain.formats.gguf_read import GgufModel
from fastbrain.lm import TransformerLm
from fastbrain.tokens.tokenizer_files import TokenizerFiles
from fastbrain.training import manifest, run_dir
from fastbrain.training.run_dir import Checkpoint, NoCheckpoint, RunDir

CHECKPOINT = "checkpoint"


class Pretrained(NamedTuple):
    """A model on the CPU, its tokenizer, and what was opened.

    Attributes:
        kind: "checkpoint", "directory", "weights" or "GGUF model".
        path: of the directory or file that was read; of a run, its checkpoint.
    """

    model: TransformerLm
    files: TokenizerFiles | None
    kind: str
    path: Path

    @property
    def source(self) -> str:
        """What was opened, in words."""
        return f"{self.kind} {self.path}"


def open_pretrained(
    path: atomic.StrPath, tokenizer: atomic.StrPath | None = None, step: int | None = None
) -> Pretrained:
    """Open a run, a checkpoint, a Hugging Face directory, or a `.rbw` or `.gguf` file.

    Args:
        path: of a run, the newest intact checkpoint is meant; nothing is renamed or locked.
        tokenizer: a tokenizer.json or a directory with one, instead of what lies beside.
        step: of a run, the checkpoint of this step.

    Raises:
        InvalidConfig: nothing of this kind, or a model that fastbrain cannot compute.
        InvalidSnapshot: it is damaged, or its tensors do not fit.
        Io, Serde: a file is missing, cut short or damaged.
    """
    path = Path(path)
    if step is not None and not run_dir.exists(path):
        raise InvalidConfig(f"a step was given, and {path} is no run: leave it out")
    files = None if tokenizer is None else TokenizerFiles.read(tokenizer)
    with atomic.io_errors("read", path):
        path.stat()
    found = _opened(path, files, step)
    vocab_size = found.model.config.vocab_size
    if found.files is not None and found.files.size > vocab_size:
        raise InvalidConfig(
            f"the tokenizer has {found.files.size} tokens, and {found.source} has a vocabulary of "
            f"{vocab_size}: name the tokenizer that it was trained with"
        )
    return found


def _opened(path: Path, files: TokenizerFiles | None, step: int | None) -> Pretrained:
    if not path.is_dir():
        return _file(path, files)
    if run_dir.exists(path):
        return _directory(_of_run(RunDir.open(path), step).path, files, CHECKPOINT)
    if (path / manifest.NAME).exists():
        _require_intact(path)
        return _directory(path, files, CHECKPOINT)
    return _directory(path, files, "directory")


def _file(path: Path, files: TokenizerFiles | None) -> Pretrained:
    if path.suffix == ".rbw":
        files = files or _beside(path.parent)
        return Pretrained(TransformerLm.load_bin(path), files, "weights", path)
    if path.suffix == ".gguf":
        files = files or GgufModel.open(path).tokenizer_files()
        return Pretrained(TransformerLm.from_pretrained(path), files, "GGUF model", path)
    raise InvalidConfig(
        f"{path} is no model that fastbrain opens: give a run, a checkpoint, a Hugging Face "
        "directory, or a file ending in .rbw or .gguf"
    )


def _directory(path: Path, files: TokenizerFiles | None, kind: str) -> Pretrained:
    if not (path / "config.json").is_file():
        raise InvalidConfig(
            f"{path} is neither a run (it has no config.toml) nor a model (it has no config.json)"
        )
    return Pretrained(TransformerLm.from_pretrained(path), files or _beside(path), kind, path)


def _beside(folder: Path) -> TokenizerFiles | None:
    return TokenizerFiles.read(folder) if (folder / "tokenizer.json").is_file() else None


def _of_run(run: RunDir, step: int | None) -> Checkpoint:
    if step is not None:
        return run.intact(step)
    refused = []
    for checkpoint in reversed(run.checkpoints()):
        try:
            return run.intact(checkpoint.step)
        except FastBrainError as error:
            refused.append(str(error))
    raise NoCheckpoint(
        f"{run.path} has no intact checkpoint"
        + (f": {refused[0]}" if refused else " yet; train it until its first save")
    )


def _require_intact(path: Path) -> None:
    try:
        found = manifest.document(path / manifest.NAME)
        reason = manifest.fault(path, str(found["run_id"]), int(found["step"]))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidSnapshot(
            f"{path / manifest.NAME} is not one that fastbrain wrote: {error!r}"
        ) from error
    if reason is not None:
        raise InvalidSnapshot(f"{path} is damaged: {reason}; use another checkpoint of its run")
