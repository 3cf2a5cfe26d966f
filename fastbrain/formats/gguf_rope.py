"""How a GGUF file says that rotary frequencies are scaled.

Linear scaling is a key. Llama 3's rule is not written down: its outcome is, as the number that each
frequency is divided by.
"""

from torch import Tensor

from fastbrain.config import LinearScaling, Llama3Scaling, RopeScaling, TransformerConfig
from fastbrain.errors import InvalidConfig
from fastbrain.formats.gguf_keys import Keys
from fastbrain.formats.strict_json import short
from fastbrain.layers import llama3_multipliers, rotary_frequencies

# what published models with Llama 3's rule have, but for the factor
_LLAMA3 = (1.0, 4.0, 8192)


def rope_factors(config: TransformerConfig, scaling: Llama3Scaling) -> Tensor:
    """What each rotary frequency is divided by: (K/2), FP32."""
    return 1 / llama3_multipliers(rotary_frequencies(config), scaling)


def divides(config: TransformerConfig, scaling: Llama3Scaling, factors: Tensor | None) -> bool:
    """Whether these factors, (K/2), are those of a scaling."""
    # the head_dim of a damaged file may be of any size
    if factors is None or 2 * factors.numel() != config.head_dim:
        return False
    expected = rope_factors(config, scaling)
    return bool(((factors - expected).abs() <= 1e-5 * expected).all())


def recognized(config: TransformerConfig, factors: Tensor) -> RopeScaling | None:
    """The scaling that a file's factors, (K/2), come from; the configuration has that of its keys.

    Raises:
        InvalidConfig: they are not those of a rule that fastbrain has.
    """
    if 2 * factors.numel() == config.head_dim and (factors == 1).all():
        return config.rope_scaling
    largest = float(factors.max())
    if config.rope_scaling is None and 1 < largest < float("inf"):
        scaling = Llama3Scaling(largest, *_LLAMA3)
        if divides(config, scaling, factors):
            return scaling
    low, high, context = _LLAMA3
    raise InvalidConfig(
        "rope_freqs.weight scales the rotary frequencies in a way that fastbrain does not have: "
        f"it knows Llama 3's rule with low_freq_factor {low:g}, high_freq_factor {high:g} and "
        f"{context} original positions"
    )


def linear_scaling(keys: Keys) -> LinearScaling | None:
    """The scaling that a file's keys give.

    Raises:
        InvalidConfig: it is of a kind that fastbrain does not have.
    """
    # the older name of the factor; 0 is none, as llama.cpp has it
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    kind = keys.get("rope.scaling.type", "linear" if factor else "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise InvalidConfig(
            f"rope.scaling.type is {short(kind)}; fastbrain has linear scaling, and Llama 3's"
        )
    return LinearScaling(factor) if factor else None
