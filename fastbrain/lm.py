"""`TransformerLm`, the object a user holds: a module, an optimizer and its state, under one name.

It delegates and computes nothing itself. A training call returns device scalars, and waits for
nothing: the host reads them when something prints them.
"""

import math
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Self

import torch
from torch import Tensor

from fastbrain import generate as decoding
from fastbrain.builder import Builder
from fastbrain.config import ParameterCounts, TransformerConfig
from fastbrain.devices import claim_cuda, naming_remedies
from fastbrain.distributed_model import DistributedModel
from fastbrain.errors import InvalidConfig, SequenceTooLong, TokenOutOfRange
from fastbrain.generate import Decoder, Stop, stop_ids
from fastbrain.layers import casting_again
from fastbrain.losses import TotalLoss, batch_losses, file_losses
from fastbrain.optim import Optimizer
from fastbrain.optimizer_state import warn_cold
from fastbrain.parallel.ranks import hearing
from fastbrain.parallel.shards import give_up
from fastbrain.sampler import Sampler
from fastbrain.tokens import TokenBatch, TokenFile
from fastbrain.tokens.ids import Ids
from fastbrain.transformer import initialize, initialize_adapters, split_parameters


class TransformerLm(DistributedModel):
    """A language model with its optimizer.

    Its attributes and files are those of `StoredModel`, training with several ranks is of
    `DistributedModel`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        optimizer: Optimizer | None = None,
        seed: int | None = None,
        mixed_precision: bool | None = None,
    ) -> None:
        """A model with fresh weights.

        Args:
            config: its shape.
            optimizer: Adam at a rate of 3e-4 unless given.
            seed: of the initial weights, in [0, 2**64); from the system when None.
            mixed_precision: BF16 operands or FP32 ones; by default BF16 on CUDA alone.
        """
        self._build(config, optimizer, mixed_precision)
        initialize(self.module, secrets.randbits(64) if seed is None else seed)
        if config.lora is not None:
            initialize_adapters(self.module)

    @classmethod
    def builder(cls) -> Builder[Self]:
        """Starts a model: one method per setting, then `build()`."""
        return Builder(cls)

    def parameter_counts(self) -> ParameterCounts:
        """Parameters in all, and those that one token uses."""
        return self.config.parameter_counts()

    # training

    def train_step(self, sequences: Sequence[Sequence[int]]) -> TotalLoss:
        """`train_step_batch(TokenBatch(sequences))`."""
        return self.train_step_batch(TokenBatch(sequences))

    def train_step_batch(self, batch: TokenBatch) -> TotalLoss:
        """One update on one batch; returns the losses before it.

        Raises:
            InvalidConfig: the model is distributed, where a batch is but a share of a step.
        """
        self._refuse_distributed("train_step_batch", "give accumulate_step and step_clipped shares")
        self._check(batch)
        self.zero_grad()
        losses = self.accumulate_step(batch)
        self.step(1.0)
        return losses

    def accumulate_step(
        self, batch: TokenBatch, weight: float = 1.0, auxiliary_weight: float | None = None
    ) -> TotalLoss:
        """Adds the gradient of this batch's mean loss, without an update.

        Args:
            batch: token ids.
            weight: factor of the whole contribution. With the batch's share of all predicted
                tokens as weight, and `step(1.0)`, ragged batches add up exactly.
            auxiliary_weight: factor of the auxiliary loss where it is to differ.

        Raises:
            InvalidConfig: a weight that is not finite.
            TokenOutOfRange: an id outside the vocabulary.
            SequenceTooLong: the batch is longer than `max_seq_len`.
            Cuda: out of device memory.
            RankLost: another rank of a distributed model is gone.
        """
        auxiliary_weight = weight if auxiliary_weight is None else auxiliary_weight
        for name, value in (("weight", weight), ("auxiliary_weight", auxiliary_weight)):
            if not math.isfinite(value):
                raise InvalidConfig(f"{name} must be a finite number, got {value}")
        self._check(batch)
        self._before_backward()
        with self._guarded():
            with casting_again() if self.sharded else nullcontext():
                losses = batch_losses(self._net, batch, self._device())
            total = losses.lm_loss * weight + losses.auxiliary_loss * auxiliary_weight
            total.backward()  # type: ignore[no-untyped-call]
        return losses.detach()

    def step(self, scale: float) -> None:
        """Updates with the accumulated gradients times `scale`, and clears them."""
        self._before_update()
        with self._guarded():
            self._state.update(self.optimizer, scale)

    def step_clipped(self, scale: float, max_norm: float, loss: Tensor | None = None) -> Tensor:
        """`step`, with the scaled gradients scaled down to `max_norm` where their norm exceeds it.

        Where the norm, or a `loss` that is given (0-d, on the model's device), is not finite,
        nothing is updated, the counter stays, and the gradients are cleared. The device decides
        that, and the host does not wait for it.

        Returns:
            The norm of the scaled gradients before clipping, 0-d FP32.
        """
        self._before_update()
        with self._guarded():
            norm = self._state.update(self.optimizer, scale, max_norm, loss)
        assert norm is not None
        return norm

    def grad_norm(self) -> Tensor:
        """L2 norm of the accumulated gradients, unscaled: 0-d FP32."""
        return self._state.grad_norm()

    def learning_rate(self) -> float:
        """The optimizer's rate."""
        return self.optimizer.learning_rate

    def set_learning_rate(self, rate: float) -> None:
        """Sets the optimizer's rate."""
        self.optimizer.set_learning_rate(rate)

    def set_optimizer_step(self, step: int) -> None:
        """Sets the counter that bias correction reads; warns when the moments are still zero."""
        self._state.set_step(step)
        if self._state.cold_since is not None:
            warn_cold(step, "set_optimizer_step")
            self._state.cold_since = None

    # evaluation

    def evaluate(self, batch: TokenBatch) -> TotalLoss:
        """The losses of a batch; touches neither gradients nor any other state.

        Each rank of a distributed model has those of its own batch. Where the model is in parts,
        every rank has to call it as often as the others.
        """
        self._check(batch)
        with torch.no_grad(), self._guarded():
            losses = batch_losses(self.module, batch, self._device())
            give_up(self.module)
        return losses

    def evaluate_file(self, tokens: TokenFile, sequences: int, seq_len: int) -> TotalLoss:
        """The losses over all of a file, in windows of `seq_len`, each token weighted alike.

        Args:
            tokens: the held-out tokens.
            sequences: windows evaluated at a time; the result does not depend on it, except for
                the auxiliary loss, whose statistics are a batch's.
            seq_len: tokens per window, of which all but the first are predicted.

        Raises:
            InvalidDataset: the file is shorter than one window.
        """
        return file_losses(self.evaluate, tokens, sequences, seq_len)

    # precision and device

    def to_cuda(self, device: int = 0, budget_mib: int = 0) -> None:
        """Moves the model to a CUDA device, moments included.

        Args:
            device: its index.
            budget_mib: MiB this process may use there; 0 is all of it.

        Raises:
            UnsupportedCuda: there is no such device, or it is older than compute capability 8.0.
            CudaMemoryBudget: weights, gradients and moments alone exceed the budget.
            Cuda: the device ran out of memory.
            InvalidConfig: the model is distributed over several ranks.
        """
        self._refuse_distributed("to_cuda")
        trained, frozen = split_parameters(self.config)
        # value, gradient and two moments, or a value alone, FP32 each
        claim_cuda(device, 16 * trained + 4 * frozen, budget_mib)
        with naming_remedies():
            self._to(torch.device("cuda", device))

    def to_cpu(self) -> None:
        """Moves the model to the CPU, moments included."""
        self._refuse_distributed("to_cpu")
        self._to(torch.device("cpu"))

    def sync_from_device(self) -> None:
        """Waits for the device; files and reads see live weights without it."""
        if self.on_device():
            torch.cuda.synchronize(self._device())

    # generation

    def generate(self, prompt: Ids, n: int, sampler: Sampler, stop: Stop = ()) -> list[int]:
        """Continues a prompt.

        Args:
            prompt: at least one id.
            n: at most so many new ids.
            sampler: how each is chosen.
            stop: an id, or several, after any of which to stop; it is included.

        Returns:
            The new ids alone.

        Raises:
            InvalidConfig: the prompt is empty, or not integers.
            SequenceTooLong: prompt and new ids exceed `max_seq_len`.
            TokenOutOfRange: a prompt id outside the vocabulary.
        """
        ends = stop_ids(stop)
        return self.generate_with(prompt, n, sampler, lambda token: token not in ends)

    def generate_with(
        self, prompt: Ids, n: int, sampler: Sampler, callback: Callable[[int], bool]
    ) -> list[int]:
        """`generate`, showing each new id to `callback`, which returns False to stop after it."""
        self._require_whole()
        return decoding.generate_with(self.module, prompt, n, sampler, callback)

    def generate_batch(
        self,
        prompts: Sequence[Ids],
        n: int,
        sampler: Sampler,
        stop: Stop = (),
    ) -> list[list[int]]:
        """`generate` for several prompts at once, which may differ in length."""
        self._require_whole()
        return decoding.generate_batch(self.module, prompts, n, sampler, stop)

    def decoder(self) -> Decoder:
        """A sequence to feed and extend piece by piece."""
        self._require_whole()
        return Decoder(self.module)

    def _check(self, batch: TokenBatch) -> None:
        if not isinstance(batch, TokenBatch):
            raise InvalidConfig(
                f"batch must be a TokenBatch(sequences), got {type(batch).__name__}"
            )
        if batch.seq_len() > self.config.max_seq_len:
            raise SequenceTooLong(batch.seq_len(), self.config.max_seq_len)
        largest = batch.max_id()
        if largest >= self.config.vocab_size:
            raise TokenOutOfRange(largest, self.config.vocab_size)

    def _before_update(self) -> None:
        super()._before_update()
        if self.quantized_file is not None:
            warnings.warn(
                f"training on from {self.quantized_file}, whose weights were rounded to 8 bits: "
                "the loss will be a little worse than it was; resume from an F32 checkpoint",
                stacklevel=3,
            )
            self.quantized_file = None

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        with naming_remedies(), hearing(self._ranks):
            yield
