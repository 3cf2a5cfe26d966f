"""What a run's last bits depend on beside its settings, as its checkpoints record it."""

import hashlib
import platform
from collections.abc import Mapping
from importlib import metadata, resources
from importlib.util import find_spec
from typing import Any

import torch

from fastbrain.training.devices import Device
from fastbrain.training.settings import Settings


def environment(
    device: Device, settings: Settings, world_size: int = 1, parallel: str | None = None
) -> dict[str, Any]:
    """Versions, threads, block sizes and the split of a step, for trainer_state.json.

    `parallel` is how several ranks share the model, None where there is one.
    """
    tiles = resources.files("fastbrain") / "kernels" / "tiles.py"
    return {
        "versions": {
            "fastbrain": metadata.version("fastbrain"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": metadata.version("triton") if find_spec("triton") else None,
            "cuda": torch.version.cuda,
            "device": device.name,
        },
        "threads": torch.get_num_threads(),
        "tile_table_sha256": hashlib.sha256(tiles.read_bytes()).hexdigest(),
        "world_size": world_size,
        "parallel": parallel,
        "micro_batch_size": settings.train.micro_batch_size,
    }


def differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What was otherwise when a checkpoint was written, one short sentence each.

    Args:
        recorded: a trainer_state.json.
        now: of `environment`.
    """
    then, ours = _flat(recorded, now), _flat(now, now)
    return [
        f"{key} was {then.get(key)}, is {value}"
        for key, value in ours.items()
        # where one of them had one process, that says it all
        if then.get(key) != value and not (key == "parallel" and None in (then.get(key), value))
    ]


def _flat(found: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    named = {key.replace("_", " "): found.get(key) for key in keys if key != "versions"}
    versions = found.get("versions")
    return {**(versions if isinstance(versions, Mapping) else {}), **named}
