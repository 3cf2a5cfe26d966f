"""Where every tensor of a model lies in a Hugging Face directory, class by class.

Our own names are those of `transformer.pieces`. A class of transformers may want another name for
a tensor, its rows in another order or its values doubled, and tensors besides that are all zero.
"""

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from fastbrain.config import TransformerConfig
from fastbrain.transformer import Piece, pieces

LLAMA = "llama"
ERNIE = "ernie4_5_moe"
QWEN2 = "qwen2_moe"
EXPORTED = (LLAMA, ERNIE, QWEN2)

# model types of our own, which transformers refuses by name; tensors lie as they do in memory
OWN_MOE = "fastbrain_moe"
OWN_LORA = "fastbrain_lora"
READ = (*EXPORTED, OWN_MOE, OWN_LORA)


class Form(Enum):
    """What is done to a matrix of ours on its way to the disk."""

    PLAIN = "as it is"
    INTERLEAVED = "the two halves of every head's rows are interleaved"
    DOUBLED = "times two"
    ZERO = "there is none of ours: all zeros"


class Stored(NamedTuple):
    """A tensor on the disk.

    Attributes:
        name, shape: as transformers knows them.
        form: how it is made of a matrix of ours.
        piece: the name of that matrix; empty for zeros.
    """

    name: str
    shape: tuple[int, ...]
    form: Form = Form.PLAIN
    piece: str = ""

    @property
    def values(self) -> int:
        """How many numbers it holds."""
        count = 1
        for size in self.shape:
            count *= size
        return count


def layout(config: TransformerConfig, arch: str) -> list[Stored]:
    """Every tensor of a model of this class, those of a block together.

    Args:
        arch: a `model_type`, one of `READ`.
    """
    found: list[Stored] = []
    layer, zeros = "", _zeros(config, arch)
    for piece in pieces(config):
        here = _layer(piece.name)
        if here != layer:
            found += zeros.pop(layer, ())
            layer = here
        found.append(_stored(piece, arch))
    return found


def interleaved(matrix: Tensor, head_dim: int) -> Tensor:
    """Rows 0 1 2 3 of a head of four as 0 2 1 3: from a rotation of halves to one of neighbors.

    Args:
        matrix: (heads * K, inputs), of queries or keys; as many rows are returned, copied.
    """
    rows, inputs = matrix.shape
    halves = matrix.reshape(rows // head_dim, 2, head_dim // 2, inputs)
    return halves.transpose(1, 2).reshape(rows, inputs)


def half_split(matrix: Tensor, head_dim: int) -> Tensor:
    """The inverse of `interleaved`."""
    rows, inputs = matrix.shape
    neighbors = matrix.reshape(rows // head_dim, head_dim // 2, 2, inputs)
    return neighbors.transpose(1, 2).reshape(rows, inputs)


def to_stored(form: Form, matrix: Tensor, head_dim: int) -> Tensor:
    """A matrix of ours with the values and the order of rows that it has on the disk."""
    match form:
        case Form.INTERLEAVED:
            return interleaved(matrix, head_dim)
        case Form.DOUBLED:
            # a shared expert is weighted by the sigmoid of its gate, and that of zero is a half
            return matrix * 2
        case _:
            return matrix


def from_stored(form: Form, matrix: Tensor, head_dim: int) -> Tensor:
    """The inverse of `to_stored`."""
    match form:
        case Form.INTERLEAVED:
            return half_split(matrix, head_dim)
        case Form.DOUBLED:
            return matrix / 2
        case _:
            return matrix


def _stored(piece: Piece, arch: str) -> Stored:
    name, form = piece.name, Form.PLAIN
    shape = (piece.cols,) if name.endswith("norm.weight") else (piece.rows, piece.cols)
    if arch == ERNIE and name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")):
        form = Form.INTERLEAVED
    if arch == QWEN2 and ".shared_experts." in name:
        name = name.replace(".shared_experts.", ".shared_expert.")
        form = Form.DOUBLED if name.endswith("down_proj.weight") else form
    return Stored(name, shape, form, piece.name)


def _zeros(config: TransformerConfig, arch: str) -> dict[str, list[Stored]]:
    """Tensors that the class has and we do not, by the layer that they belong to."""
    if arch not in (ERNIE, QWEN2):
        return {}
    return {
        str(layer): [
            Stored(f"model.layers.{layer}.mlp.{name}", shape, Form.ZERO)
            for name, shape in _zeros_of_a_layer(config, arch)
        ]
        for layer in config.moe_layers
    }


def _zeros_of_a_layer(
    config: TransformerConfig, arch: str
) -> Iterator[tuple[str, tuple[int, ...]]]:
    if arch == ERNIE:
        yield "moe_statics.e_score_correction_bias", (1, config.num_experts)
        return
    yield "shared_expert_gate.weight", (1, config.d_model)
    if not config.shared_expert:
        yield "shared_expert.gate_proj.weight", (config.moe_d_ff, config.d_model)
        yield "shared_expert.up_proj.weight", (config.moe_d_ff, config.d_model)
        yield "shared_expert.down_proj.weight", (config.d_model, config.moe_d_ff)


def _layer(name: str) -> str:
    parts = name.split(".")
    return parts[2] if parts[1] == "layers" else ""
