"""Optimizers as plain values that say how to update.

A value is read afresh at each step, so changing its rate, or the whole optimizer, in the middle of
a run is legal. What its updates need to remember is in `fastbrain.optimizer_state`. `FusedAdam` is
something else: a `torch.optim.Optimizer`, for modules that fastbrain knows nothing of.
"""

from dataclasses import dataclass

from fastbrain.errors import InvalidConfig
from fastbrain.fused_adam import FusedAdam

__all__ = ["Adam", "FusedAdam", "Lion", "Optimizer", "Sgd", "in_range"]


@dataclass
class Optimizer:
    """An update rule. Build one with `adam`, `sgd` or `lion`.

    Attributes:
        learning_rate: size of an update.
    """

    learning_rate: float

    def __post_init__(self) -> None:
        self.check()

    @staticmethod
    def adam(
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decay_vectors: bool = True,
    ) -> "Adam":
        """Adam with decoupled weight decay.

        Args:
            learning_rate: size of an update.
            betas: decay rates of the first and second moment, in [0, 1).
            eps: added to the square root of the second moment.
            weight_decay: share of a weight, times the rate, that each update takes away.
            decay_vectors: whether decay reaches tensors of one row, such as norm weights.

        Raises:
            InvalidConfig: a value outside its range.
        """
        return Adam(learning_rate, betas, eps, weight_decay, decay_vectors)

    @staticmethod
    def sgd(learning_rate: float) -> "Sgd":
        """Plain gradient descent, without momentum or decay."""
        return Sgd(learning_rate)

    @staticmethod
    def lion(
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        decay_vectors: bool = True,
    ) -> "Lion":
        """Lion (Chen et al., 2023, arXiv 2302.06675) with decoupled decay; arguments as `adam`."""
        return Lion(learning_rate, betas, weight_decay, decay_vectors)

    def set_learning_rate(self, rate: float) -> None:
        """Sets the rate of the updates to come."""
        self.learning_rate = rate
        self.check()

    def check(self) -> None:
        """Raises InvalidConfig where a field is outside its range."""
        in_range("learning_rate", self.learning_rate, 0.0)


@dataclass
class Sgd(Optimizer):
    """w -= rate * g."""


@dataclass
class Adam(Optimizer):
    """Adam; see `Optimizer.adam` for the fields and `fastbrain.kernels.adam_step` for the rule."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay_vectors: bool = True

    def check(self) -> None:
        super().check()
        _check_betas(self.betas)
        in_range("eps", self.eps, 0.0)
        in_range("weight_decay", self.weight_decay, 0.0)


@dataclass
class Lion(Optimizer):
    """u = b1 m + (1 - b1) g;  m = b2 m + (1 - b2) g;  w -= rate * (sign(u) + decay * w)."""

    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    decay_vectors: bool = True

    def check(self) -> None:
        super().check()
        _check_betas(self.betas)
        in_range("weight_decay", self.weight_decay, 0.0)


def in_range(name: str, value: float, lowest: float, below: float = float("inf")) -> None:
    """Raises InvalidConfig unless lowest <= value < below."""
    if not lowest <= value < below:
        rule = f"at least {lowest:g}" + ("" if below == float("inf") else f" and below {below:g}")
        raise InvalidConfig(f"{name} must be a finite number of {rule}, got {value}")


def _check_betas(betas: tuple[float, float]) -> None:
    if len(betas) != 2:
        raise InvalidConfig(f"betas must be two rates, got {betas}")
    for beta in betas:
        in_range("betas", beta, 0.0, 1.0)
