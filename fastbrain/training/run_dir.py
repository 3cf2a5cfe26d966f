"""The directory of a run: its layout, and checkpoints that are there whole or not at all.

A checkpoint is written under a temporary name, flushed, and renamed to `step-<8 digits>`, so that
whatever carries that name was complete once; the manifest inside says whether it still is. What
is refused is renamed, never deleted, and the newest intact one is found by its step, never by a
clock or a pointer file. Only the holder of the run's lock calls what renames or deletes.
"""

import os
import re
import secrets
import shutil
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from fastbrain import atomic
from fastbrain.errors import InvalidConfig, InvalidSnapshot, Io, Serde
from fastbrain.formats import strict_toml
from fastbrain.training import keeping, manifest, toml

_NAME = re.compile(r"step-(\d{8,})")
_SUPERSEDED = re.compile(r"step-(\d{8,})(\.[0-9a-f]+)?\.superseded")

_Signature = tuple[tuple[str, int, int], ...]


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
    # what was found intact here, and the sizes and times of its files then
    _known: dict[Path, _Signature] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def create(cls, path: Path, tables: Mapping[str, Any]) -> Self:
        """Make a run of a directory by writing its config.toml, with a fresh run id."""
        with atomic.io_errors("create", path):
            path.mkdir(parents=True, exist_ok=True)
            for name in ("checkpoints", "samples"):
                (path / name).mkdir(exist_ok=True)
            # a power loss must not take the run's own name
            atomic.sync_dir(path.parent)
        return cls(path, secrets.token_hex(16), {}).rewritten(tables, ())

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing run.

        Raises:
            InvalidConfig: there is no run at `path`, or its config.toml is not one that
                fastbrain wrote.
            InvalidSnapshot: a newer fastbrain wrote it.
        """
        if not exists(path):
            left = ", but checkpoints: put it back" if any(path.glob("checkpoints/step-*")) else ""
            raise InvalidConfig(f"there is no run at {path}: it has no config.toml{left}")
        try:
            with (
                atomic.io_errors("read", path / "config.toml"),
                (path / "config.toml").open("rb") as file,
            ):
                tables = strict_toml.loads(file.read(strict_toml.MAX_BYTES + 1))
            run_id, version = str(tables["run_id"]), tables["format_version"]
        except (Serde, KeyError) as error:
            why = f"it lacks {error.args[0]}" if isinstance(error, KeyError) else str(error)
            raise InvalidConfig(
                f"{path / 'config.toml'} is not the configuration of a run: {why}"
            ) from error
        if version != manifest.FORMAT_VERSION:
            raise InvalidSnapshot(
                f"{path / 'config.toml'} is of format {version!r}, and this fastbrain reads "
                f"{manifest.FORMAT_VERSION}; go on with the fastbrain that wrote it"
            )
        return cls(path, run_id, tables)

    def rewritten(self, tables: Mapping[str, Any], overridden: Iterable[str]) -> Self:
        """Write config.toml anew, with the same run id.

        Args:
            tables: the settings.
            overridden: settings that were changed on purpose in the middle of the run, now or
                earlier, as dotted keys.
        """
        stamps: dict[str, Any] = {
            "format_version": manifest.FORMAT_VERSION,
            "run_id": self.run_id,
            "overridden": sorted(overridden) or None,
        }
        document = toml.dumps({**stamps, **tables})
        atomic.write_bytes(self.path / "config.toml", document.encode())
        return type(self)(self.path, self.run_id, tomllib.loads(document))

    @property
    def metrics(self) -> Path:
        """The rows of all steps and evaluations."""
        return self.path / "metrics.jsonl"

    @property
    def guard_log(self) -> Path:
        """The rows of all skips, spikes and rollbacks."""
        return self.path / "guard.jsonl"

    @property
    def samples(self) -> Path:
        """The folder of generated texts."""
        return self.path / "samples"

    def checkpoints(self) -> list[Checkpoint]:
        """Every committed checkpoint, oldest step first, none of them verified."""
        with atomic.io_errors("read", self._checkpoints):
            found = [(_NAME.fullmatch(path.name), path) for path in self._checkpoints.iterdir()]
        return sorted(Checkpoint(int(name[1]), path) for name, path in found if name)

    def checkpoint(self, step: int) -> Checkpoint:
        """The checkpoint of a step, whether it is there or not."""
        return Checkpoint(step, self._checkpoints / f"step-{step:08d}")

    def commit(
        self, step: int, write: Callable[[Path], Mapping[str, atomic.Written]]
    ) -> Checkpoint:
        """Write a checkpoint durably and give it its name.

        Args:
            step: steps finished.
            write: fills the empty directory that it is given, flushing every file, and says what
                it wrote.
        """
        final = self.checkpoint(step).path
        temporary = self._checkpoints / f".tmp-step-{step}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            with atomic.io_errors("write", temporary):
                temporary.mkdir()
            manifest.write(temporary, self.run_id, step, write(temporary))
            signature = _signature(temporary)
            if final.exists():
                raise Io(f"cannot write {final}: it is there already; move it elsewhere")
            with atomic.io_errors("write", final):
                atomic.rename(temporary, final)
                atomic.sync_dir(self._checkpoints)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._known[final] = signature
        return Checkpoint(step, final)

    def newest(self, warn: Callable[[str], object]) -> Checkpoint | None:
        """The newest intact checkpoint, or None in a run that never committed one.

        A damaged one is reported to `warn` and renamed `step-<n>.corrupt`; one of another run is
        reported and left alone.

        Raises:
            NoCheckpoint: there are some, and all are damaged.
            InvalidSnapshot: one is of a newer format.
        """
        if not self._checkpoints.is_dir():
            raise NoCheckpoint(
                f"{self.path} has no folder of checkpoints: put {self._checkpoints} back, or begin "
                "another run"
            )
        committed = self.checkpoints()
        for checkpoint in reversed(committed):
            reason = self._fault(checkpoint)
            if reason is None:
                return checkpoint
            warn(f"refused {checkpoint.path}: {reason}")
            if self._is_foreign(checkpoint):
                warn(f"{checkpoint.path} has a name that this run may need: move it elsewhere")
            else:
                self._put_aside(checkpoint, "corrupt")
        if committed or any(self._checkpoints.glob("step-*.corrupt")):
            raise NoCheckpoint(
                f"{self.path} has no intact checkpoint; the damaged ones are kept as "
                f"{self._checkpoints}/step-*.corrupt"
            )
        return None

    def intact(self, step: int) -> Checkpoint:
        """The checkpoint of one step, verified.

        Raises:
            InvalidConfig: there is no checkpoint of that step.
            InvalidSnapshot: it is damaged; it stays where it is.
        """
        own = {checkpoint.step: checkpoint for checkpoint in self.checkpoints()}
        if step not in own:
            have = ", ".join(map(str, own)) or "none"
            raise InvalidConfig(f"{self.path} has no checkpoint of step {step}; it has {have}")
        reason = self._fault(own[step])
        if reason is not None:
            others = ", ".join(str(each) for each in own if each != step)
            way_out = f"choose another of {others}" if others else "there is no other"
            raise InvalidSnapshot(f"{own[step].path} cannot be used: {reason}; {way_out}")
        return own[step]

    def go_back(self, step: int) -> None:
        """Put checkpoints later than `step` aside, so that `step` is the newest."""
        self._supersede(each for each in self.checkpoints() if each.step > step)

    def carry_out(self, rollbacks: Sequence[tuple[int, int]]) -> None:
        """Put checkpoints aside that a decided rollback gave up, which may be done already.

        Args:
            rollbacks: (first step given up, how many rows of steps to pass over), as decided.
        """
        for number, (first, _) in enumerate(rollbacks, start=1):
            self._supersede(
                each
                for each in self.checkpoints()
                if each.step > first and not _knows(each.path, number)
            )

    def retain(
        self,
        keep: int,
        keep_every: int,
        best: int | None,
        warn: Callable[[str], object],
        way_back: int | None = None,
    ) -> None:
        """Delete what need not stay, after a commit (see `keeping.kept`).

        What is damaged is renamed, what belongs to another run is left alone.
        """
        own = [each for each in self.checkpoints() if not self._is_foreign(each)]
        newest = own[-1].step
        intact = {each.step for each in own if self._still_intact(each, warn)}
        stay = keeping.kept(intact, newest, best, keep, keep_every, way_back)
        for checkpoint in own:
            if checkpoint.step in intact and checkpoint.step not in stay:
                self._delete(checkpoint.path)
        for path in self._checkpoints.iterdir():
            name = _SUPERSEDED.fullmatch(path.name)
            if name and int(name[1]) <= newest:
                self._delete(path)

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def _fault(self, checkpoint: Checkpoint) -> str | None:
        signature = _signature(checkpoint.path)
        reason = manifest.fault(checkpoint.path, self.run_id, checkpoint.step)
        if reason is None:
            self._known[checkpoint.path] = signature
        return reason

    def _still_intact(self, checkpoint: Checkpoint, warn: Callable[[str], object]) -> bool:
        # reading gigabytes after every save would wear the disk: what has not been touched since
        # it was written or read here is what it was
        if self._known.get(checkpoint.path) == _signature(checkpoint.path):
            return True
        reason = self._fault(checkpoint)
        if reason is not None:
            warn(f"refused {checkpoint.path}: {reason}")
            self._put_aside(checkpoint, "corrupt")
        return reason is None

    def _is_foreign(self, checkpoint: Checkpoint) -> bool:
        return manifest.owner(checkpoint.path) not in (None, self.run_id)

    def _supersede(self, checkpoints: Iterable[Checkpoint]) -> None:
        for checkpoint in checkpoints:
            self._put_aside(checkpoint, "superseded")

    def _put_aside(self, checkpoint: Checkpoint, why: str) -> None:
        aside = checkpoint.path.with_name(f"{checkpoint.path.name}.{why}")
        while aside.exists():
            aside = aside.with_name(f"{checkpoint.path.name}.{secrets.token_hex(4)}.{why}")
        with atomic.io_errors("rename", checkpoint.path):
            atomic.rename(checkpoint.path, aside)
            atomic.sync_dir(self._checkpoints)

    def _delete(self, path: Path) -> None:
        # the name goes first: a half-deleted directory must not look like a checkpoint
        doomed = path.with_name(f".tmp-del-{path.name}-{secrets.token_hex(4)}")
        with atomic.io_errors("delete", path):
            atomic.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def exists(path: Path) -> bool:
    """Whether there is a run at `path`."""
    return (path / "config.toml").is_file()


def sweep(path: Path) -> None:
    """Remove what a killed writer left half done at `path`, also before there was a run."""
    for each in path.glob("checkpoints/.tmp-*"):
        shutil.rmtree(each, ignore_errors=True)
    for pattern in (".tmp-config.toml-*", "data/.tmp-*", "samples/.tmp-*"):
        for each in path.glob(pattern):
            with suppress(OSError):
                each.unlink()


def _signature(directory: Path) -> _Signature:
    try:
        found = [(each.name, each.stat()) for each in sorted(directory.iterdir())]
    except OSError:
        return ()
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def _knows(directory: Path, rollbacks: int) -> bool:
    """Whether a checkpoint was written after so many rollbacks; unreadable ones are left."""
    try:
        state = manifest.document(directory / "trainer_state.json")
        return len(state["guard"]["data_skips"]) >= rollbacks
    except (Io, Serde, KeyError, TypeError):
        return True
