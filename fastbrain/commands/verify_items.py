"""What `fastbrain verify` compares: each checkpoint, each token file, each file of rows.

A trainer may delete or rename a checkpoint while it is read here; that is no damage.
"""

import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fastbrain import atomic
from fastbrain.errors import FastBrainError, InvalidConfig, InvalidSnapshot, Serde
from fastbrain.formats.strict_json import short
from fastbrain.training import manifest, run_dir
from fastbrain.training.run_dir import RunDir

_STEP = re.compile(r"step-(\d{8,})(\..+)?")
_ASIDE = re.compile(r"step-(\d{8,})(?:\.[0-9a-f]+)?\.(corrupt|superseded)")
_MOST_TOKENIZER_BYTES = 64 << 20


class Item(NamedTuple):
    """One thing that was compared.

    Attributes:
        state: "intact", "damaged", "gone" (deleted meanwhile), "aside" (not counted), or "newer".
        words: the state as a reader should see it, with the reason.
        step: of a checkpoint, else None.
        bytes, bytes_read: its size, and how much of it was read.
    """

    name: str
    state: str
    words: str
    step: int | None = None
    bytes: int = 0
    bytes_read: int = 0


Check = Callable[[], Item]


def of(path: Path) -> tuple[bool, list[Check]]:
    """Whether `path` is a run, and what has to be checked of it, the newest checkpoint first.

    Raises:
        InvalidConfig: neither a run nor a checkpoint.
        Io: it cannot be read.
    """
    if run_dir.exists(path):
        return True, _of_run(RunDir.open(path))
    with atomic.io_errors("read", path):
        is_directory = stat.S_ISDIR(path.stat().st_mode)
    if is_directory and ((path / manifest.NAME).exists() or _STEP.fullmatch(path.resolve().name)):
        return False, [_alone(path)]
    raise InvalidConfig(
        f"{path} is neither a run (it has no config.toml) nor a checkpoint (it has no "
        f"{manifest.NAME}); give the directory of one of them"
    )


def _of_run(run: RunDir) -> list[Check]:
    folder = run.path / "checkpoints"
    checks: list[Check] = []
    if folder.is_dir():
        for each in reversed(run.checkpoints()):
            checks.append(_checkpoint(each.path, run.run_id, each.step))
        aside = [path for path in sorted(folder.iterdir()) if _ASIDE.fullmatch(path.name)]
        checks += [_put_aside(path) for path in aside]
    checks += _of_data(run.path / "data")
    checks += [_rows(path) for path in (run.metrics, run.guard_log) if path.exists()]
    return checks


def _alone(path: Path) -> Check:
    """A checkpoint by its own manifest, and by its name and its run where those say something."""
    name = _STEP.fullmatch(path.resolve().name)
    home = path.resolve().parent
    try:
        found = manifest.document(path / manifest.NAME)
        run_id, step = found.get("run_id"), found.get("step")
        if not isinstance(run_id, str) or type(step) is not int:
            raise Serde(f"{manifest.NAME} is not one that fastbrain wrote")
        if home.name == "checkpoints" and run_dir.exists(home.parent):
            run_id = RunDir.open(home.parent).run_id
    except FastBrainError as error:
        item = Item(path.name, "damaged", f"damaged: {error}", 0, _size(path))
        return lambda: item
    return _checkpoint(path, run_id, int(name[1]) if name else step)


def _checkpoint(path: Path, run_id: str, step: int) -> Check:
    def check() -> Item:
        size, before = _size(path), _identity(path)
        try:
            reason = manifest.fault(path, run_id, step)
        except InvalidSnapshot as error:
            return Item(path.name, "newer", str(error), step, size)
        if reason is None:
            return Item(path.name, "intact", "intact", step, size, size)
        if _identity(path) != before or before is None:
            return Item(path.name, "gone", "deleted or renamed meanwhile, by the trainer", step)
        return Item(path.name, "damaged", f"damaged: {reason}", step, size, size)

    return check


def _put_aside(path: Path) -> Check:
    why = "damaged earlier" if path.suffix == ".corrupt" else "given up"
    return lambda: Item(path.name, "aside", f"put aside: {why}; not counted", None, _size(path))


def _of_data(folder: Path) -> Iterator[Check]:
    path = folder / "corpus.json"
    try:
        record = manifest.document(path)
        files = record.get("files")
        if not isinstance(files, dict) or not all(map(_is_known, files.values())):
            raise Serde(f"{path.name} is not one that fastbrain wrote")
    except FastBrainError as error:
        item = Item("data/corpus.json", "damaged", f"damaged: {error}")
        yield lambda: item
        return
    for known in files.values():
        yield _tokens(folder / known["path"], known)
    if record.get("eos") is not None:
        yield _tokenizer(folder / "tokenizer.json", record.get("tokenizer_sha256"))


def _is_known(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("path"), str)
        and "\0" not in value["path"]
        and type(value.get("bytes")) is int
        and isinstance(value.get("sha256"), str)
    )


def _tokens(path: Path, known: dict[str, Any]) -> Check:
    # one outside of the run is known by its whole path
    name = known["path"] if Path(known["path"]).is_absolute() else f"data/{known['path']}"

    def check() -> Item:
        try:
            with atomic.io_errors("read", path):
                found = path.stat()
            size = found.st_size
            if not stat.S_ISREG(found.st_mode):
                return Item(name, "damaged", "damaged: it is not a plain file")
            if size != known["bytes"]:
                reason = f"it has {size} bytes, and had {known['bytes']} when the run began"
                return Item(name, "damaged", f"damaged: {reason}", None, size)
            if atomic.sha256_of(path) != known["sha256"]:
                reason = "its content is not that with which the run began"
                return Item(name, "damaged", f"damaged: {reason}", None, size, size)
        except FastBrainError as error:
            return Item(name, "damaged", f"damaged: {error}")
        return Item(name, "intact", "intact", None, size, size)

    return check


def _tokenizer(path: Path, sha256: object) -> Check:
    name = "data/tokenizer.json"

    def check() -> Item:
        # brings torch with it, which nothing else here needs
        from fastbrain.tokens.tokenizer import load_tokenizer, tokenizer_sha256

        try:
            with atomic.io_errors("read", path):
                size = path.stat().st_size
            if size > _MOST_TOKENIZER_BYTES:
                raise Serde(f"it has {size} bytes, more than any tokenizer")
            found = tokenizer_sha256(load_tokenizer(path))
        except FastBrainError as error:
            return Item(name, "damaged", f"damaged: {error}")
        if found != sha256:
            reason = f"its digest is {found}, and was {short(sha256)} when the run began"
            return Item(name, "damaged", f"damaged: {reason}", None, size, size)
        return Item(name, "intact", "intact", None, size, size)

    return check


def _rows(path: Path) -> Check:
    def check() -> Item:
        from fastbrain.commands.inspect_rows import scan

        try:
            found = scan(path)
            size = path.stat().st_size
        except (FastBrainError, OSError) as error:
            return Item(path.name, "damaged", f"damaged: {error}")
        if found.bad_count and not found.count:
            return Item(path.name, "damaged", "damaged: no line of it is a row", None, size, size)
        words = f"intact, {found.count:,} rows"
        if found.bad_count:
            # what a full disk or a power loss leaves; the rows around it are good
            words += f"; {found.fault}"
        return Item(path.name, "intact", words, None, size, size)

    return check


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _size(path: Path) -> int:
    try:
        return sum(each.stat().st_size for each in path.iterdir() if each.is_file())
    except OSError:
        return 0
