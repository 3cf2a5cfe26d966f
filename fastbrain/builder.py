"""The fluent way to a model: one method per setting, then `build`."""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, Generic, Self, TypeVar

from fastbrain.config import ParameterCounts, RopeScaling, TransformerConfig
from fastbrain.errors import InvalidConfig
from fastbrain.optim import Optimizer

Model = TypeVar("Model")


class Builder(Generic[Model]):
    """Collects settings; nothing is checked or allocated before `build`.

    Unset ones keep the defaults of `TransformerConfig`, Adam at a rate of 3e-4, a seed from the
    system, and mixed precision where the device gains by it.
    """

    def __init__(self, make: Callable[..., Model]) -> None:
        self._make = make
        self._config: dict[str, Any] = {}
        self._run: dict[str, Any] = {}

    def config(self, config: TransformerConfig) -> Self:
        """Takes every field of the shape at once."""
        self._config = {field.name: getattr(config, field.name) for field in fields(config)}
        return self

    def vocab_size(self, size: int) -> Self:
        """Token ids are in [0, size)."""
        return self._set(vocab_size=size)

    def d_model(self, width: int) -> Self:
        """Width of the residual stream."""
        return self._set(d_model=width)

    def n_layers(self, layers: int) -> Self:
        """Number of blocks."""
        return self._set(n_layers=layers)

    def heads(self, query: int, key_value: int, width: int) -> Self:
        """Query heads, key-value heads (a divisor of them), and the width of each."""
        return self._set(n_heads=query, n_kv_heads=key_value, head_dim=width)

    def d_ff(self, width: int) -> Self:
        """Hidden width of a dense feed-forward."""
        return self._set(d_ff=width)

    def moe_d_ff(self, width: int) -> Self:
        """Hidden width of one expert, and of the shared one."""
        return self._set(moe_d_ff=width)

    def experts(self, number: int, per_token: int) -> Self:
        """Experts of a MoE layer, and how many of them each token visits."""
        return self._set(num_experts=number, experts_per_token=per_token)

    def moe_layers(self, layers: Iterable[int]) -> Self:
        """Indices of the layers that are mixtures of experts, such as range(5, 20)."""
        return self._set(moe_layers=layers)

    def shared_expert(self, enabled: bool) -> Self:
        """Whether MoE layers have an expert that every token visits."""
        return self._set(shared_expert=enabled)

    def max_seq_len(self, tokens: int) -> Self:
        """Longest sequence; the size of the rotary table."""
        return self._set(max_seq_len=tokens)

    def rope_base(self, base: float) -> Self:
        """Base of the rotary frequencies."""
        return self._set(rope_base=base)

    def rope_scaling(self, scaling: RopeScaling | None) -> Self:
        """How the rotary frequencies are stretched to a longer context."""
        return self._set(rope_scaling=scaling)

    def rmsnorm_eps(self, eps: float) -> Self:
        """Added to the mean square in every norm."""
        return self._set(rmsnorm_eps=eps)

    def tie_embeddings(self, tied: bool) -> Self:
        """Whether the head is the embedding itself."""
        return self._set(tie_embeddings=tied)

    def aux_loss_weight(self, weight: float) -> Self:
        """Weight of the load-balance loss; 0 disables it."""
        return self._set(aux_loss_weight=weight)

    def router_z_loss_weight(self, weight: float) -> Self:
        """Weight of the router's z-loss; 0 disables it."""
        return self._set(router_z_loss_weight=weight)

    def optimizer(self, optimizer: Optimizer) -> Self:
        """The update rule."""
        self._run["optimizer"] = optimizer
        return self

    def seed(self, seed: int) -> Self:
        """Of the initial weights, in [0, 2**64): the same seed gives the same model."""
        self._run["seed"] = seed
        return self

    def mixed_precision(self, enabled: bool) -> Self:
        """Whether products take BF16 operands; see `TransformerLm.set_mixed_precision`."""
        self._run["mixed_precision"] = enabled
        return self

    def bidirectional(self, enabled: bool) -> Self:
        """Refuses True: attention over later tokens is not supported."""
        if enabled:
            raise InvalidConfig(
                "bidirectional models (causal = false) are not supported; leave "
                "bidirectional out, or give it False, for a causal model"
            )
        return self

    def parameter_counts(self) -> ParameterCounts:
        """Total and active parameters of the model as set so far; nothing is allocated."""
        return TransformerConfig(**self._config).parameter_counts()

    def build(self) -> Model:
        """The model.

        Raises:
            InvalidConfig: a setting breaks a rule; the message names it.
        """
        return self._make(TransformerConfig(**self._config), **self._run)

    def _set(self, **fields: Any) -> Self:
        self._config |= fields
        return self
