"""Whether this process is one of several, as torchrun's environment says; known without torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from fastbrain.errors import InvalidConfig

_NEEDED = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """How this process was started; alone unless torchrun says otherwise.

    Attributes:
        rank: which of all processes it is, from 0.
        world_size: how many there are, on all machines.
        local_rank: which it is of those on this machine.
        local_world_size: how many are on this machine.
        restarts_left: how often torchrun would still start all of them anew.
        by_torchrun: whether the parent of this process is torchrun.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restarts_left: int = 0
    by_torchrun: bool = False

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read the environment.

        Raises:
            InvalidConfig: WORLD_SIZE is of several processes and what else torchrun sets is
                missing, or a value is not a number that fits.
        """
        world_size = _whole(environment, "WORLD_SIZE", 1, 1)
        restarts = _whole(environment, "TORCHELASTIC_RESTART_COUNT", 0, 0)
        launcher: dict[str, Any] = {
            "restarts_left": _whole(environment, "TORCHELASTIC_MAX_RESTARTS", 0, 0) - restarts,
            "by_torchrun": "TORCHELASTIC_RUN_ID" in environment,
        }
        if world_size == 1:
            return cls(**launcher)
        missing = [name for name in _NEEDED if name not in environment]
        if missing:
            raise InvalidConfig(
                f"the environment says WORLD_SIZE={world_size} and has no {', '.join(missing)}: "
                f"start the processes by torchrun (torchrun --nproc-per-node {world_size} -m "
                "fastbrain.train ...), or unset WORLD_SIZE to train in one"
            )
        found = cls(
            rank=_whole(environment, "RANK", 0, 0),
            world_size=world_size,
            local_rank=_whole(environment, "LOCAL_RANK", 0, 0),
            local_world_size=_whole(environment, "LOCAL_WORLD_SIZE", 1, 1),
            **launcher,
        )
        if found.rank >= world_size:
            raise InvalidConfig(
                f"RANK must be below WORLD_SIZE, which is {world_size}, got {found.rank}; torchrun "
                "sets both"
            )
        return found

    @property
    def run_option(self) -> str:
        """What the option for a run's directory is called on this process's command line."""
        # torchrun before Python 3.12 takes --run after the program's name for an option of its own
        return "--run-dir" if self.by_torchrun else "--run"

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other."""
        return self.world_size == 1


def _whole(environment: Mapping[str, str], name: str, default: int, least: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal() or int(text) < least:
        raise InvalidConfig(
            f"the environment variable {name} must be a whole number of at least {least}, got "
            f"{text!r}; torchrun sets it"
        )
    return int(text)
