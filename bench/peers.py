"""The Hugging Face models that a fastbrain training step is measured against.

A peer has the same widths, heads, rotary base, epsilon and tied embedding as ours, starts from its
library's own initial weights, and is driven as its documentation says: the model computes its loss
from `labels`, PyTorch's fused AdamW takes the step, no gradient checkpointing, no cache. It must be
the best peer that setting options can give, or beating it would mean nothing; that is why a mixture
of experts offers every implementation its library has.

Two differences remain, both in the peer's architecture: Qwen2-MoE multiplies its shared expert by a
learned gate (d_model parameters a layer), and has no router z-loss, which ours computes.
"""

from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from bench.shapes import TrainingShape
from bench.torch_trainee import TorchTrainee

MISSING = (
    "the peers are Hugging Face models and need transformers 5 or newer; "
    "install them with `pip install '.[bench]'`"
)

# batched_mm copies an expert's weights for every token routed to it
_COPY_LIMIT_BYTES = 4 * 2**30


def available() -> bool:
    """Whether a transformers that has the peers is installed."""
    try:
        return int(metadata.version("transformers").split(".")[0]) >= 5
    except metadata.PackageNotFoundError:
        return False


class Peer(TorchTrainee):
    """A Hugging Face causal language model of a shape, with the optimizer that trains it.

    Args:
        shape: what to build; a config with MoE layers becomes Qwen2-MoE, one without Llama.
        device: where it trains.
        seed: of the initial weights.

    Attributes:
        name: the peer's architecture.
    """

    name = "Hugging Face"

    def __init__(self, shape: TrainingShape, device: torch.device, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__(causal_model(shape), device)
        self.name = "qwen2-moe" if shape.config.moe_layers else "llama"

    @staticmethod
    def missing(device: torch.device) -> str | None:
        """Why it cannot run here, or None."""
        return None if available() else MISSING

    def use(self, precision: str, option: str | None) -> None:
        """Switch the precision, and the experts implementation where there are experts."""
        self.precision = precision
        if option is not None and option != self.model.config._experts_implementation:
            self.model.set_experts_implementation(option)

    def loss(self, ids: Tensor) -> Tensor:
        out: Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return out


def causal_model(shape: TrainingShape) -> Any:
    """The Hugging Face model that is nearest to a shape's configuration."""
    return _qwen2_moe(shape) if shape.config.moe_layers else _llama(shape)


def experts_implementations(shape: TrainingShape) -> Iterator[tuple[str | None, str | None]]:
    """Every experts implementation of the installed library and why not to try it, or None.

    A dense shape has the one implementation None. An implementation that is yielded with no
    reason against it may still refuse when it runs: some want packages or a GPU.
    """
    c = shape.config
    if not c.moe_layers:
        yield None, None
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    expert_bytes = 3 * c.d_model * c.moe_d_ff * 4
    copied = shape.tokens * c.experts_per_token * expert_bytes * len(c.moe_layers)
    for name in ["eager", *sorted(ALL_EXPERTS_FUNCTIONS.valid_keys())]:
        too_large = name == "batched_mm" and copied > _COPY_LIMIT_BYTES
        yield name, f"it copies {copied / 2**30:.0f} GiB of weights a step" if too_large else None


def _llama(shape: TrainingShape) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_common(shape)))


def _qwen2_moe(shape: TrainingShape) -> Any:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    c = shape.config
    config = Qwen2MoeConfig(
        **_common(shape),
        qkv_bias=False,
        mlp_only_layers=[i for i in range(c.n_layers) if i not in c.moe_layers],
        num_experts=c.num_experts,
        num_experts_per_tok=c.experts_per_token,
        moe_intermediate_size=c.moe_d_ff,
        shared_expert_intermediate_size=c.moe_d_ff,
        norm_topk_prob=True,
        # the load-balancing loss is only computed along with the router's logits
        output_router_logits=True,
        router_aux_loss_coef=c.aux_loss_weight,
    )
    return Qwen2MoeForCausalLM(config)


def _common(shape: TrainingShape) -> dict[str, Any]:
    c = shape.config
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.d_model,
        "intermediate_size": c.d_ff,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_seq_len,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_base},
        "rms_norm_eps": c.rmsnorm_eps,
        "tie_word_embeddings": c.tie_embeddings,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
