"""Mixture of experts: a router, stacked SwiGLU experts without capacity limit, a shared expert.

Routing (probabilities over all experts, top-k, gates renormalized over the chosen) and the two
auxiliary losses follow Shazeer et al., 2017 (arXiv 1701.06538), Fedus et al., 2021
(arXiv 2101.03961) and Zoph et al., 2022 (arXiv 2202.08906).
"""

from typing import Any

import torch
from torch import Tensor, nn

from fastbrain.config import LoraConfig, TransformerConfig
from fastbrain.kernels import expert_ffn
from fastbrain.layers import FeedForward, Weight


class MixtureOfExperts(nn.Module):
    """The feed-forward of a MoE layer."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        D, F, E = config.d_model, config.moe_d_ff, config.num_experts
        self.top_k = config.experts_per_token
        self.aux_loss_weight = config.aux_loss_weight
        self.router_z_loss_weight = config.router_z_loss_weight
        # FP32 whatever the operands: a rounded logit would send a token elsewhere
        self.router = nn.Parameter(torch.empty(E, D))
        self.gate_up = Weight(E, 2 * F, D)
        self.down = Weight(E, D, F)
        self.shared = FeedForward(D, F) if config.shared_expert else None

    def adapt(self, lora: LoraConfig) -> None:
        """Gives every expert an adapter, and the shared one; the router has none."""
        _, width, hidden = self.down.weight.shape
        self.gate_up.adapt([hidden, hidden], lora)
        self.down.adapt([width], lora)
        if self.shared is not None:
            self.shared.adapt(lora)

    def forward(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Tokens through their experts.

        Args:
            x: (N, D).
            valid: (N) bool; False on padding, which is not routed and counts in no statistic.

        Returns:
            (N, D) in x's dtype, and the weighted auxiliary loss of this layer, 0-d FP32.
        """
        with torch.autocast(x.device.type, enabled=False):
            logits: Tensor = _Logits.apply(x, self.router)  # type: ignore[no-untyped-call]
        probabilities = logits.softmax(dim=-1)
        # a stable sort, so that the lower expert wins a tie
        ranked = probabilities.detach().sort(dim=-1, descending=True, stable=True).indices
        expert_ids = ranked[:, : self.top_k]
        chosen = probabilities.gather(1, expert_ids)
        total = chosen.sum(dim=-1, keepdim=True)
        gates = torch.where(total > 0, chosen / total, chosen)
        if valid is not None:
            expert_ids = expert_ids.masked_fill(~valid[:, None], -1)
            gates = gates.masked_fill(~valid[:, None], 0)
        gate_up, gate_up_shadow = self.gate_up.operands(x.dtype)
        down, down_shadow = self.down.operands(x.dtype)
        shadows = None
        if gate_up_shadow is not None and down_shadow is not None:
            shadows = gate_up_shadow, down_shadow
        y = expert_ffn(x, gate_up, down, expert_ids, gates, shadows)
        if self.shared is not None:
            y = y + self.shared(x)
        return y, self._auxiliary_loss(logits, probabilities, expert_ids, valid)

    def _auxiliary_loss(
        self, logits: Tensor, probabilities: Tensor, expert_ids: Tensor, valid: Tensor | None
    ) -> Tensor:
        """aux * E * sum_e f_e P_e + z * mean(logsumexp^2), over valid tokens.

        f_e is the share of routed slots that went to e and carries no gradient; P_e is the mean
        probability of e.
        """
        N, E = logits.shape
        count: Tensor | int = N
        square = logits.logsumexp(dim=-1).square()
        if valid is not None:
            count = valid.sum()
            square = square * valid
            probabilities = probabilities * valid[:, None]
        experts = torch.arange(E, device=logits.device)
        routed = (expert_ids.flatten()[:, None] == experts).sum(dim=0)
        share = routed / (count * self.top_k)
        balance = E * (share * (probabilities.sum(dim=0) / count)).sum()
        z = square.sum() / count
        return self.aux_loss_weight * balance + self.router_z_loss_weight * z


class _Logits(torch.autograd.Function):
    """x @ router.T in the router's FP32, saving x as it is: widened, it would be twice as much."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, router: Tensor) -> Tensor:
        ctx.save_for_backward(x, router)
        return x.to(router.dtype) @ router.T

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor, Tensor]:
        x, router = ctx.saved_tensors
        return (dlogits @ router).to(x.dtype), dlogits.T @ x.to(router.dtype)
