"""The same model in plain PyTorch, as one would write it today: the peer for `torch.compile`.

Its parameters have the names and shapes of `fastbrain.transformer.Transformer`, so that weights
move between the two, and its loss is the same: next-token cross-entropy plus the router's two
losses. Attention is `scaled_dot_product_attention`, experts are `grouped_mm` over rows sorted by
expert, and mixed precision is autocast.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbrain import TransformerConfig
from fastbrain.layers import rotary_table


class PlainModel(nn.Module):
    """A decoder-only transformer of a fastbrain configuration, with normal initial weights."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        V, D = config.vocab_size, config.d_model
        self.embedding = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = nn.RMSNorm(D, config.rmsnorm_eps)
        self.lm_head = None if config.tie_embeddings else nn.Linear(D, V, bias=False)
        cos, sin = rotary_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """What training minimizes over ids (B, S) int64: 0-d FP32."""
        S = ids.shape[1]
        x = self.embedding(ids)
        auxiliary = torch.zeros((), device=x.device)
        for block in self.blocks:
            x, loss = block(x, self.cos[:S, None], self.sin[:S, None])
            auxiliary = auxiliary + loss
        weight = self.embedding.weight if self.lm_head is None else self.lm_head.weight
        logits = F.linear(self.norm(x)[:, :-1].flatten(0, 1), weight)
        return F.cross_entropy(logits.float(), ids[:, 1:].flatten()) + auxiliary


class Block(nn.Module):
    """Attention and feed-forward, each reading the normalized residual stream."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        D = config.d_model
        self.attention_norm = nn.RMSNorm(D, config.rmsnorm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(D, config.rmsnorm_eps)
        self.is_moe = config.is_moe(layer)
        self.feed_forward = Experts(config) if self.is_moe else FeedForward(D, config.d_ff)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | float]:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.feed_forward_norm(x)
        if not self.is_moe:
            return x + self.feed_forward(y), 0.0
        y, auxiliary = self.feed_forward(y.flatten(0, 1))
        return x + y.view(x.shape), auxiliary


class Attention(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads)
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.d_model, sum(self.heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.n_heads * config.head_dim, config.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=-2)
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        y = F.scaled_dot_product_attention(
            *(h.transpose(1, 2) for h in (q, k, v)), is_causal=True, enable_gqa=True
        )
        out: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return out


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class Grouped(nn.Module):
    """One weight per expert, (E, outputs, inputs)."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Rows (M, inputs) sorted by expert; `ends` (E) int32 is where each expert's rows end."""
        product = torch._grouped_mm if rows.dtype == torch.bfloat16 else _grouped_mm_eagerly
        out: Tensor = product(rows, self.weight.to(rows.dtype).mT, offs=ends)
        return out


@torch.compiler.disable
def _grouped_mm_eagerly(*given: Tensor, offs: Tensor) -> Tensor:
    # it computes in any precision, but is traced in BF16 alone
    return torch._grouped_mm(*given, offs=offs)


class Experts(nn.Module):
    """Routed experts, none of whose tokens are dropped, and a shared one."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        D, F_, E = config.d_model, config.moe_d_ff, config.num_experts
        self.config = config
        self.router = nn.Parameter(torch.empty(E, D))
        self.gate_up = Grouped(E, 2 * F_, D)
        self.down = Grouped(E, D, F_)
        self.shared = FeedForward(D, F_) if config.shared_expert else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(N, D) to (N, D), and the weighted auxiliary loss, 0-d FP32."""
        c, device = self.config, x.device.type
        with torch.autocast(device, enabled=False):
            logits = x.float() @ self.router.T
        probabilities = logits.softmax(dim=-1)
        chosen, ids = probabilities.topk(c.experts_per_token, dim=-1)
        gates = chosen / chosen.sum(dim=-1, keepdim=True)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        token = order // c.experts_per_token
        experts = torch.arange(c.num_experts, device=x.device)
        counts = (flat[:, None] == experts).sum(dim=0)
        ends = counts.cumsum(0).int()
        operand = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        gate, up = self.gate_up(x.to(operand)[token], ends).chunk(2, dim=-1)
        y = self.down(F.silu(gate) * up, ends) * gates.flatten()[order, None]
        out = torch.zeros(x.shape, dtype=y.dtype, device=y.device).index_add(0, token, y)
        if self.shared is not None:
            out = out + self.shared(x)
        share = counts / len(flat)
        balance = c.num_experts * (share * probabilities.mean(dim=0)).sum()
        z = logits.logsumexp(dim=-1).square().mean()
        return out, c.aux_loss_weight * balance + c.router_z_loss_weight * z


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
