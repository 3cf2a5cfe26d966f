"""What `TransformerLm` is made of, and how that goes into files and comes back."""

import warnings
from copy import copy
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from fastbrain.atomic import StrPath
from fastbrain.config import LoraConfig, TransformerConfig
from fastbrain.errors import InvalidConfig, InvalidSnapshot
from fastbrain.formats import gguf_read, hf_export, hf_import, opt, rbl, rbw
from fastbrain.kernels import has_fast_bf16
from fastbrain.layers import Weight
from fastbrain.optim import Optimizer
from fastbrain.optimizer_state import OptimizerState
from fastbrain.parallel.shards import is_sharded
from fastbrain.precision import Precision
from fastbrain.tokens.tokenizer_files import TokenizerFiles
from fastbrain.transformer import (
    LORA_DOWN,
    LORA_UP,
    Transformer,
    initialize_adapters,
    named_views,
    pieces,
)


class StoredModel:
    """A module, an optimizer and its state, with every way to write and to read them.

    Attributes:
        config: the shape; only `add_lora` and `merge_lora` change it.
        module: the `torch.nn.Module` (see `fastbrain.transformer.Transformer`).
        optimizer: a plain value, read afresh at each step.
        quantized_file: the file that the weights came from, where they were rounded to 8 bits.
    """

    config: TransformerConfig
    module: Transformer
    optimizer: Optimizer
    _state: OptimizerState
    _mixed_precision: bool | None
    quantized_file: str | None

    def _build(
        self,
        config: TransformerConfig,
        optimizer: Optimizer | None = None,
        mixed_precision: bool | None = None,
    ) -> None:
        """Sets every attribute; the weights are still to be filled."""
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise InvalidConfig(
                f"optimizer must be of Optimizer.adam, .sgd or .lion, got {optimizer!r}"
            )
        self.config = config
        self.module = Transformer(config)
        # a value: two models that were given the same one do not share its rate
        self.optimizer = copy(optimizer) if optimizer else Optimizer.adam(3e-4)
        self._state = OptimizerState(self.module)
        self._mixed_precision = None
        self.quantized_file = None
        if mixed_precision is not None:
            self.set_mixed_precision(mixed_precision)

    def set_mixed_precision(self, enabled: bool) -> None:
        """BF16 operands in matrix products (FP32 weights, gradients and sums), or FP32 ones."""
        self._mixed_precision = enabled
        self._set_precision()
        if enabled and not self.on_device() and not has_fast_bf16("cpu"):
            warnings.warn(
                "this CPU has no BF16 instructions, so mixed precision is slower here than FP32; "
                "set_mixed_precision(False) is faster",
                stacklevel=2,
            )

    def on_device(self) -> bool:
        """Whether the model is on a CUDA device."""
        return self._device().type == "cuda"

    def optimizer_step(self) -> int:
        """Updates applied so far. Reading it waits for the device."""
        return int(self._state.step)

    # the crate's files

    def save_bin(self, path: Any, precision: Precision = Precision.F32) -> None:
        """Writes the weights, optimizer settings and step counter in the crate's format.

        Args:
            path: replaced only once the new file is complete.
            precision: F32 for a checkpoint, Q8 for a file that only has to answer.

        Raises:
            Io: the file cannot be written.
        """
        rbw.write(
            path, self.config, self.optimizer, self.optimizer_step(), self.weights(), precision
        )

    @classmethod
    def load_bin(cls, path: Any) -> Self:
        """The model in a file of `save_bin` or of the crate, on the CPU, with zero moments.

        Raises:
            InvalidSnapshot: not such a file, or its tensors do not fit its configuration.
            Serde: its header is damaged.
            InvalidConfig: its configuration is not valid or not supported.
            Io: it is missing or cut short.
        """
        header = rbw.read_header(path)
        model = cls.__new__(cls)
        model._build(header.config, header.optimizer)
        rbw.read_tensors(path, header, model.weights())
        model._state.set_step(header.optimizer_step)
        if header.precision is Precision.Q8:
            model.quantized_file = str(path)
        return model

    def save_optimizer_state(self, path: Any) -> None:
        """Writes moments and step counter in the crate's format."""
        opt.write(path, self.optimizer_step(), self.moments())

    def load_optimizer_state(self, path: Any, negated_matrices: bool = False) -> None:
        """Restores moments and step counter; all of them or, on an error, none.

        Args:
            path: a file of `save_optimizer_state` or of the crate.
            negated_matrices: set it for a file that version 2.0.0 or 2.0.1 of the crate wrote from
                a CUDA device: those hold the first moments of matrices with the wrong sign.

        Raises:
            InvalidSnapshot: not such a file, or one of another architecture.
            Io: it is missing or cut short.
        """
        before = self.optimizer_step()
        step = opt.read(path, self.moments(), negated_matrices)
        if before not in (0, step):
            warnings.warn(
                f"{path} holds the optimizer state of step {step}, but these weights are of step "
                f"{before}; continuing with the counter of the file",
                stacklevel=2,
            )
        self._state.set_step(step)
        self._state.mark_warm()

    # Hugging Face and GGUF

    def save_pretrained(
        self,
        out: StrPath,
        files: TokenizerFiles | None = None,
        *,
        arch: str = "auto",
        dtype: str = "float32",
        max_shard_bytes: int = 5_000_000_000,
        force: bool = False,
    ) -> Path:
        """Writes a directory that transformers loads with equal logits; returns its path.

        Args:
            out: the directory; it appears once it is complete.
            files: the tokenizer to put beside the weights.
            arch: "llama", "ernie4_5_moe", "qwen2_moe", or "auto": llama for a dense model and
                ernie4_5_moe for a mixture of experts. "own" holds any model, and is read by
                fastbrain alone where there are experts.
            dtype: "float32" or "bfloat16".
            max_shard_bytes: a weights file larger than this is split.
            force: take the place of what is at `out`.

        Raises:
            InvalidConfig: the architecture cannot hold this model, `out` exists, or an adapter is
                attached: merge it first.
            Io: `out` cannot be written.
        """
        if self.config.lora is not None:
            raise InvalidConfig(
                "a model with a LoRA adapter has no place in a directory of Hugging Face's: call "
                "merge_lora() first, and save_lora() before that to keep the adapter"
            )
        return hf_export.write_directory(
            out,
            self.config,
            self.weights(),
            arch=arch,
            dtype=dtype,
            files=files,
            max_shard_bytes=max_shard_bytes,
            force=force,
        )

    @classmethod
    def from_pretrained(cls, path: StrPath) -> Self:
        """The model in a Hugging Face directory, a checkpoint directory or a GGUF file.

        It is FP32, on the CPU, with zero moments and a fresh Adam.

        Raises:
            InvalidConfig: a setting that fastbrain cannot compute; names it and its value.
            InvalidSnapshot: tensors that are missing, too many or of the wrong shape.
            Serde: a file is damaged.
            Io: a file is missing or cut short.
        """
        is_gguf = Path(path).suffix == ".gguf"
        source = gguf_read.GgufModel.open(path) if is_gguf else hf_import.Directory.open(path)
        model = cls.__new__(cls)
        model._build(source.config)
        source.read_into(model.weights())
        return model

    # adapters

    def add_lora(self, lora: LoraConfig) -> None:
        """Attaches low-rank adapters to every projection; they alone are trained from now on.

        The output stays what it was until the first update. Moments start at zero; the step
        counter stays.

        Raises:
            InvalidConfig: there are adapters already.
        """
        if self.config.lora is not None:
            raise InvalidConfig(
                "this model has a LoRA adapter already; merge_lora() makes it part of the weights, "
                "and another can be added then"
            )
        self.module.add_adapters(lora)
        initialize_adapters(self.module)
        self._adapters_changed()

    def merge_lora(self) -> None:
        """Makes the adapters part of the weights, all of which are trained from then on.

        Raises:
            InvalidConfig: there are none.
        """
        self._lora("merge_lora")
        self.module.merge_adapters()
        self._adapters_changed()

    def save_lora(self, path: StrPath) -> None:
        """Writes the adapters alone, in the crate's format.

        Raises:
            InvalidConfig: there are none.
            Io: the file cannot be written.
        """
        rbl.write(path, self._lora("save_lora"), self.adapters())

    def load_lora(self, path: StrPath) -> None:
        """Restores adapters into those attached, which must have their rank, alpha and seed.

        Moments and the step counter stay as they are: load an optimizer state, or add the adapters
        anew, before training on.

        Raises:
            InvalidSnapshot: no adapter is attached, or the file's is of other settings or of
                another model.
            Serde: the file is damaged.
            Io: it is missing or cut short.
        """
        if self.config.lora is None:
            found = rbl.read_settings(path)
            raise InvalidSnapshot(
                f"{path} is to be loaded into adapters, and this model has none: call "
                f"add_lora(LoraConfig({found.rank}, {found.alpha:g}, {found.seed})) first"
            )
        rbl.read(path, self.config.lora, self.adapters())

    def adapters(self) -> list[tuple[str, Tensor]]:
        """The matrices of the adapters in file order, as `weights`; none without an adapter."""
        return [each for each in self.weights() if each[0].endswith((LORA_DOWN, LORA_UP))]

    # tensors

    def weights(self) -> list[tuple[str, Tensor]]:
        """The crate's tensors in file order, as (Hugging Face name, matrix) views.

        Raises:
            InvalidConfig: the model is in parts over several ranks.
        """
        self._require_whole()
        own = {name: p.detach() for name, p in self.module.named_parameters()}
        return named_views(self.config, own)

    def gradients(self) -> list[tuple[str, Tensor]]:
        """The accumulated gradients, as `weights`; zeros where there is none."""
        self._require_whole()
        own = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in self.module.named_parameters()
        }
        return named_views(self.config, own)

    def moments(self) -> list[tuple[str, Tensor, Tensor]]:
        """(name, first moment, second moment) of every tensor, as views in file order.

        Those of a frozen tensor are 0 x 0.
        """
        self._require_whole()
        first, second = self._state.moments()
        none = torch.empty(0, 0)
        found = []
        for piece in pieces(self.config):
            views = [none, none]
            if piece.parameter in first:
                views = [piece.view(first[piece.parameter]), piece.view(second[piece.parameter])]
            found.append((piece.name, views[0], views[1]))
        return found

    def _require_whole(self) -> None:
        if is_sharded(self.module):
            raise InvalidConfig(
                "this rank has but a part of every tensor: gathered(), called on every rank, gives "
                "the first one the model whole"
            )

    def _lora(self, method: str) -> LoraConfig:
        if self.config.lora is None:
            raise InvalidConfig(f"{method} needs a LoRA adapter; add_lora attaches one")
        return self.config.lora

    def _adapters_changed(self) -> None:
        self.config = self.module.config
        self.module.zero_grad(set_to_none=True)
        self._state.forget_moments()

    def _set_precision(self) -> None:
        enabled = self.on_device() if self._mixed_precision is None else self._mixed_precision
        self.module.mixed_precision = enabled
        if not enabled:
            for weight in self.module.modules():
                if isinstance(weight, Weight):
                    weight.drop_shadow()

    def _device(self) -> torch.device:
        return self.module.embedding.weight.device
