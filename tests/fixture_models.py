"""The fixtures in the tests' own words: what the reference system computed, model by model.

Every agreement is the one that fixtures/README.md states; tests name them and carry no other.
"""

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastbrain import Optimizer, TokenBatch, TokenFile, TransformerConfig, TransformerLm

FIXTURES = Path(__file__).parent / "fixtures"
MODELS = ("dense", "moe_shared", "moe_untied", "one_expert", "sgd", "head64")

LOGITS = 1e-5  # of the largest
GRADIENTS = 2e-5  # of the largest
LOSS = 2e-6
# an fp64 run is itself up to 2.5e-6 away: 156 losses near 4 were summed one by one in fp32
CHUNK_LOSS = 3e-6
NORM = 1e-5  # relative
SERIES_LOSS = 5e-5
SERIES_NORM = 2e-4  # relative
CONTINUED_LOSS = 1e-5


class Reference:
    """One fixture folder: its numbers, its corpus, and the model that they speak of."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = FIXTURES / name
        self.expected = read_json(f"{name}/expected.json")
        self.digests: dict[str, str] = read_json("digests.json")[name]

    @cached_property
    def config(self) -> TransformerConfig:
        fields = self.expected["config"]
        return TransformerConfig(**fields | {"moe_layers": tuple(fields["moe_layers"])})

    @cached_property
    def corpus(self) -> TokenFile:
        return TokenFile.open(self.folder / "corpus.bin", 42)

    def build(self) -> TransformerLm:
        """A model from the seed, which is what the reference system had before training."""
        builder = TransformerLm.builder().config(self.config)
        optimizer = optimizer_from_text(self.expected["optimizer"])
        return builder.optimizer(optimizer).seed(self.expected["seed"]).build()

    def trained(self, *, moments: bool) -> TransformerLm:
        """The model after 20 steps, with its moments or, as after a weights-only load, zeros."""
        model = TransformerLm.load_bin(self.folder / "trained.rbw")
        if moments:
            model.load_optimizer_state(self.folder / "trained.opt")
        return model

    def batch(self, kind: str) -> TokenBatch:
        """The batch called `plain`, `padded`, `masked` or `supervised`."""
        expected = self.expected[kind]
        if kind == "padded":
            return TokenBatch(expected["sequences"])
        if kind == "supervised":
            return TokenBatch.supervised(expected["pairs"])
        plain = self.corpus.batch(1_000_000, 3, 20)
        return plain.with_loss_mask(expected["mask"]) if kind == "masked" else plain

    def floats(self, file: str) -> Tensor:
        """A raw file of fp32 values, as one row."""
        return torch.from_numpy(np.fromfile(self.folder / file, dtype="<f4"))


@cache
def read_json(file: str) -> Any:
    return json.loads((FIXTURES / file).read_text())


def optimizer_from_text(text: str) -> Optimizer:
    """The optimizer that the reference system prints as `Sgd { learning_rate: 1.0 }`."""
    field = {name: float(value) for name, value in re.findall(r"(\w+): ([\d.e-]+)", text)}
    rate = field["learning_rate"]
    if text.startswith("Sgd"):
        return Optimizer.sgd(rate)
    betas, decay = (field["beta1"], field["beta2"]), field["weight_decay"]
    if text.startswith("Lion"):
        return Optimizer.lion(rate, betas=betas, weight_decay=decay)
    return Optimizer.adam(rate, betas=betas, eps=field["epsilon"], weight_decay=decay)


def assert_loss(loss: Any, expected: Sequence[float], agreement: float) -> None:
    """Compare a TotalLoss with [lm_loss, auxiliary_loss]."""
    found = [float(loss.lm_loss), float(loss.auxiliary_loss)]
    errors = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    assert all(error <= agreement for error in errors), (
        f"losses {found}, expected {list(expected)}: {errors} apart, {agreement} allowed"
    )


def assert_norm(norm: Any, expected: float, agreement: float) -> None:
    """Compare a norm with its expected value, relative to that value."""
    error = abs(float(norm) - expected) / expected
    assert error <= agreement, f"norm {float(norm)}, expected {expected}: {error:.1e} of it apart"


def assert_values(found: Tensor, expected: Tensor, agreement: float) -> None:
    """Compare tensors of equally many values; the agreement is a fraction of the largest."""
    error = (found.double().flatten() - expected.double().flatten()).abs().max()
    budget = agreement * expected.double().abs().max()
    assert error <= budget, f"error {error:.2e} over budget {budget:.2e}"


def assert_same_bits(
    found: Iterable[tuple[str, Tensor]], expected: Iterable[tuple[str, Tensor]]
) -> None:
    """Compare two lists of named fp32 tensors bit for bit."""
    for (name, a), (other, b) in zip(found, expected, strict=True):
        assert name == other
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)), f"{name} differs"
