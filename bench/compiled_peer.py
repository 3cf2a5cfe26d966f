"""`bench.plain_model` under `torch.compile`: what PyTorch makes of a model without our kernels."""

from typing import Any

import torch
from torch import Tensor

from bench.compiling import compiler_missing, compiling, interpreted
from bench.plain_model import PlainModel
from bench.shapes import TrainingShape
from bench.torch_trainee import TorchTrainee

# the default, and the one that makes CUDA graphs of what it compiles
_GRAPHS = "reduce-overhead"


class CompiledPeer(TorchTrainee):
    """A plain PyTorch model of a shape, compiled for forward and backward.

    On a card it is compiled as a whole. On a CPU, where that takes minutes, it is block by block:
    blocks are alike, and what is compiled for one serves the others.

    Args:
        shape: what to build.
        device: where it trains.
        seed: of the initial weights.
    """

    name = "compiled PyTorch"

    def __init__(self, shape: TrainingShape, device: torch.device, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__(PlainModel(shape.config), device)
        self._mode: str | None = None
        self._run: Any = self.model
        if device.type == "cpu":
            for block in self.model.blocks:
                block.compile(**compiling())
        else:
            self._run = torch.compile(self.model, **compiling())

    @staticmethod
    def missing(device: torch.device) -> str | None:
        """Why it cannot run here, or None."""
        return compiler_missing(device)

    @staticmethod
    def options(device: torch.device) -> tuple[str | None, ...]:
        """The modes of `torch.compile` that may be the fastest here."""
        return (None, _GRAPHS) if device.type == "cuda" and not interpreted() else (None,)

    def use(self, precision: str, option: str | None) -> None:
        """Switch the precision, and the mode of `torch.compile`."""
        self.precision = precision
        if option != self._mode:
            self._mode = option
            self._run = torch.compile(self.model, **compiling(option))

    def loss(self, ids: Tensor) -> Tensor:
        if self._mode == _GRAPHS:
            # what the last step returned may be overwritten
            torch.compiler.cudagraph_mark_step_begin()
        out: Tensor = self._run(ids)
        return out
