"""Which tensors a GGUF file has for a configuration, and what they are of ours.

Everything is one to one, but that experts are stacked, and that rows of queries and keys are
permuted: rotary embedding turns channels j and j + K/2 of a head here, and 2j and 2j + 1 there.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fastbrain.config import TransformerConfig
from fastbrain.errors import InvalidConfig
from fastbrain.formats.binary import row_blocks
from fastbrain.transformer import Piece, pieces

LLAMA = "llama"
ERNIE_MOE = "ernie4_5-moe"
ROPE_FACTORS = "rope_freqs.weight"
# as many as llama.cpp has room for
LLAMA_CPP_LAYERS = 512
LLAMA_CPP_EXPERTS = 512

_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")},
    **{f"mlp.experts.{each}_proj": f"ffn_{each}_exps" for each in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{each}_proj": f"ffn_{each}_shexp" for each in ("gate", "up", "down")},
}
_BLOCK_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_EXPERT = re.compile(r"experts\.\d+\.")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        shape: the length of a row last.
        heads: how many heads its rows are permuted within; 0 where they are not.
        exact: whether it is FP32 in every file.
        parts: the Hugging Face names of what it is made of: one, or one per expert.
    """

    shape: tuple[int, ...]
    heads: int
    exact: bool
    parts: list[str] = field(default_factory=list)

    def blocks(self) -> Iterator[slice]:
        """Rows of a part to be handled at once: a few megabytes, or one head."""
        rows, cols = self.shape[-2:] if len(self.shape) > 1 else (1, *self.shape)
        if not self.heads:
            return row_blocks(rows, 4 * cols)
        head_dim = rows // self.heads
        return (slice(first, first + head_dim) for first in range(0, rows, head_dim))


def architecture(config: TransformerConfig) -> str:
    """Which of llama.cpp's architectures computes the same."""
    return ERNIE_MOE if config.moe_layers else LLAMA


def layout(config: TransformerConfig) -> dict[str, GgufTensor]:
    """The tensors by name, in the order of our own files; rotary factors are not among them."""
    heads = {"attn_q": config.n_heads, "attn_k": config.n_kv_heads}
    found: dict[str, GgufTensor] = {}
    for piece in pieces(config):
        name = _name(piece)
        kind = name.split(".")[-2]
        if name not in found:
            is_vector = kind.endswith("norm")
            shape: tuple[int, ...] = (piece.cols,) if is_vector else (piece.rows, piece.cols)
            if kind.endswith("_exps"):
                shape = (config.num_experts, *shape)
            exact = is_vector or kind == "ffn_gate_inp"
            found[name] = GgufTensor(shape, heads.get(kind, 0), exact)
        found[name].parts.append(piece.name)
    return found


def fitting(config: TransformerConfig, weights: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The weights of a model by name.

    Raises:
        InvalidConfig: they are those of another configuration.
    """
    expected = [(piece.name, (piece.rows, piece.cols)) for piece in pieces(config)]
    if [(name, tuple(view.shape)) for name, view in weights] != expected:
        raise InvalidConfig("the weights are not those of a model with this configuration")
    return dict(weights)


def _name(piece: Piece) -> str:
    found = _BLOCK_NAME.fullmatch(piece.name)
    if found is None:
        return _OUTSIDE[piece.name]
    return f"blk.{found[1]}.{_IN_BLOCK[_EXPERT.sub('experts.', found[2])]}.weight"
