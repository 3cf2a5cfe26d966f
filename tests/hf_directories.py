"""Hugging Face directories that tests write, change and read back."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from models import DENSE, MOE, model
from safetensors.torch import load_file
from torch import Tensor

from fastbrain import TransformerConfig, TransformerLm
from fastbrain.config import LinearScaling, Llama3Scaling
from fastbrain.formats.hf_export import write_directory
from fastbrain.formats.hf_import import Directory
from fastbrain.formats.safetensors_file import write_tensors

# as wide as its heads together, since some classes do not declare another width of a head
MODELS: dict[str, TransformerConfig] = {
    "dense": DENSE,
    "dense-untied": dataclasses.replace(DENSE, tie_embeddings=False),
    "dense-narrow": dataclasses.replace(DENSE, head_dim=10),
    "dense-linear": dataclasses.replace(DENSE, rope_scaling=LinearScaling(4.0)),
    "dense-llama3": dataclasses.replace(DENSE, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 16)),
    "moe": MOE,
    "moe-untied": dataclasses.replace(MOE, tie_embeddings=False, rope_base=5e5, rmsnorm_eps=1e-5),
    "moe-alone": dataclasses.replace(MOE, shared_expert=False, num_experts=3),
    "moe-first": dataclasses.replace(MOE, moe_layers=(0,), n_layers=3, experts_per_token=1),
    "moe-scattered": dataclasses.replace(MOE, moe_layers=(0, 2), n_layers=3),
}
EXPORTS = [
    (name, arch)
    for name, config in MODELS.items()
    for arch in (("ernie4_5_moe", "qwen2_moe") if config.moe_layers else ("llama",))
    if (name, arch) != ("moe-scattered", "ernie4_5_moe")
]


def exported(out: Path, config: TransformerConfig, **options: Any) -> TransformerLm:
    """A model with weights that all matter, written to `out`."""
    made = model(config)
    write_directory(out, config, made.weights(), **options)
    return made


def imported(directory: Path) -> TransformerLm:
    """The model in a directory, read into other weights than its own."""
    found = Directory.open(directory)
    made = TransformerLm(found.config, seed=99)
    found.read_into(made.weights())
    return made


def settings(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def with_settings(directory: Path, changes: Mapping[str, Any], *, keep_own: bool = False) -> None:
    """Change config.json; a value of None stays, and one of `...` is taken out."""
    found = settings(directory) | dict(changes)
    if not keep_own:
        found.pop("fastbrain", None)
    found = {key: value for key, value in found.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(found))


def with_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of model.safetensors."""
    path = directory / "model.safetensors"
    found = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(found)
    write_tensors(path, found)


def logits_scale(logits: Tensor) -> Tensor:
    return logits.double().abs().max()


def all_weights(made: TransformerLm) -> dict[str, Tensor]:
    return {name: torch.clone(view) for name, view in made.weights()}
