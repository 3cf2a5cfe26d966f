"""The directory of a run: its layout, and checkpoints that are there whole or not at all.

A checkpoint is written under a temporary name, flushed, and renamed to `step-<8 digits>`, so that
whatever carries that name was complete once; the manifest inside says whether it still is. What
is refused is renamed, never deleted, and the newest intact one is found by its step, never by a
clock or a pointer file.
"""

import os
import re
import secrets
import shutil
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from fastbrain import atomic
from fastbrain.errors import InvalidConfig, InvalidSnapshot
from fastbrain.training import manifest, toml

_NAME = re.compile(r"step-(\d{8,})")
_SUPERSEDED = re.compile(r"step-(\d{8,})\.superseded")


class NoCheckpoint(InvalidSnapshot):
    """A run has checkpoints, and none of them is intact."""


class Checkpoint(NamedTuple):
    """A committed checkpoint: the steps that were finished, and its directory."""

    step: int
    path: Path


@dataclass(frozen=True)
class RunDir:
    """One run's directory; `tables` is its config.toml as it was when this was opened."""

    path: Path
    run_id: str
    tables: Mapping[str, Any]

    @classmethod
    def create(cls, path: Path, tables: Mapping[str, Any]) -> Self:
        """Make a run of a directory by writing its config.toml, with a fresh run id."""
        run_id = secrets.token_hex(16)
        stamps = {"format_version": manifest.FORMAT_VERSION, "run_id": run_id}
        with atomic.io_errors("create", path):
            path.mkdir(parents=True, exist_ok=True)
            for name in ("checkpoints", "samples"):
                (path / name).mkdir(exist_ok=True)
        document = toml.dumps({**stamps, **tables})
        atomic.write_bytes(path / "config.toml", document.encode())
        return cls(path, run_id, tomllib.loads(document))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing run.

        Raises:
            InvalidConfig: there is no run at `path`, or its config.toml is not one that
                fastbrain wrote.
        """
        if not exists(path):
            raise InvalidConfig(f"there is no run at {path}: it has no config.toml")
        try:
            with atomic.io_errors("read", path / "config.toml"):
                tables = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
            return cls(path, str(tables["run_id"]), tables)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError) as error:
            raise InvalidConfig(
                f"{path / 'config.toml'} is not the configuration of a run ({error})"
            ) from error

    @property
    def metrics(self) -> Path:
        """The rows of all steps and evaluations."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """The folder of generated texts."""
        return self.path / "samples"

    def checkpoints(self) -> list[Checkpoint]:
        """Every committed checkpoint, oldest step first, none of them verified."""
        with atomic.io_errors("read", self._checkpoints):
            found = [(_NAME.fullmatch(path.name), path) for path in self._checkpoints.iterdir()]
        return sorted(Checkpoint(int(name[1]), path) for name, path in found if name)

    def commit(self, step: int, write: Callable[[Path], None]) -> Checkpoint:
        """Write a checkpoint durably and give it its name.

        Args:
            step: steps finished.
            write: fills the empty directory that it is given, flushing every file.
        """
        final = self._checkpoints / f"step-{step:08d}"
        temporary = self._checkpoints / f".tmp-step-{step}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            with atomic.io_errors("write", temporary):
                temporary.mkdir()
            write(temporary)
            manifest.write(temporary, self.run_id, step)
            with atomic.io_errors("write", final):
                atomic.rename(temporary, final)
                atomic.sync_dir(self._checkpoints)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return Checkpoint(step, final)

    def newest(self, warn: Callable[[str], object]) -> Checkpoint | None:
        """The newest intact checkpoint, or None in a run that never committed one.

        A damaged one is reported to `warn` and renamed `step-<n>.corrupt`.

        Raises:
            NoCheckpoint: there are some, and all are damaged.
        """
        if not self._checkpoints.is_dir():
            raise NoCheckpoint(f"{self.path} has no folder of checkpoints: {self._checkpoints}")
        committed = self.checkpoints()
        for checkpoint in reversed(committed):
            reason = manifest.fault(checkpoint.path, self.run_id, checkpoint.step)
            if reason is None:
                return checkpoint
            warn(f"refused {checkpoint.path}: {reason}")
            self._put_aside(checkpoint, "corrupt")
        if committed or any(self._checkpoints.glob("step-*.corrupt")):
            raise NoCheckpoint(
                f"{self.path} has no intact checkpoint; the damaged ones are kept as "
                f"{self._checkpoints}/step-*.corrupt"
            )
        return None

    def go_back(self, step: int) -> None:
        """Put checkpoints later than `step` aside, so that `step` is the newest.

        Raises:
            InvalidConfig: there is no checkpoint of that step.
        """
        steps = [checkpoint.step for checkpoint in self.checkpoints()]
        if step not in steps:
            have = ", ".join(map(str, steps)) or "none"
            raise InvalidConfig(f"{self.path} has no checkpoint of step {step}; it has {have}")
        for checkpoint in self.checkpoints():
            if checkpoint.step > step:
                self._put_aside(checkpoint, "superseded")

    def retain(self, keep: int, keep_every: int, best: int | None) -> None:
        """Delete what need not stay, after a commit.

        The newest, the best, every multiple of `keep_every` (0: none) and the newest `keep` of
        the others stay.
        """
        steps = self.checkpoints()
        newest = steps[-1].step
        free = [
            each
            for each in steps
            if each.step not in (newest, best) and not (keep_every and each.step % keep_every == 0)
        ]
        for checkpoint in free[: max(len(free) - keep, 0)]:
            self._delete(checkpoint.path)
        for path in self._checkpoints.iterdir():
            name = _SUPERSEDED.fullmatch(path.name)
            if name and int(name[1]) <= newest:
                self._delete(path)

    def sweep(self) -> None:
        """Remove what a killed writer left half done."""
        for path in self._checkpoints.glob(".tmp-*"):
            shutil.rmtree(path, ignore_errors=True)

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def _put_aside(self, checkpoint: Checkpoint, why: str) -> None:
        aside = checkpoint.path.with_name(f"{checkpoint.path.name}.{why}")
        while aside.exists():
            aside = aside.with_name(f"{checkpoint.path.name}.{secrets.token_hex(4)}.{why}")
        with atomic.io_errors("rename", checkpoint.path):
            atomic.rename(checkpoint.path, aside)
            atomic.sync_dir(self._checkpoints)

    def _delete(self, path: Path) -> None:
        # the name goes first: a half-deleted directory must not look like a checkpoint
        doomed = path.with_name(f".tmp-del-{path.name}")
        with atomic.io_errors("delete", path):
            atomic.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def exists(path: Path) -> bool:
    """Whether there is a run at `path`."""
    return (path / "config.toml").is_file()
