"""TransformerConfig: its rules in their order, its numbers as files hold them, its counts."""

import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from fastbrain.config import LinearScaling, Llama3Scaling, TransformerConfig, float32
from fastbrain.errors import InvalidConfig

# the model of about 300M that the documentation of the reference system describes
CHAPTER = TransformerConfig(
    vocab_size=32_000, d_model=1024, n_layers=20, n_heads=16, n_kv_heads=4, head_dim=64,
    d_ff=2816, moe_d_ff=512, num_experts=8, experts_per_token=2, moe_layers=range(5, 20),
    max_seq_len=1024,
)  # fmt: skip
TINY = TransformerConfig(
    vocab_size=5, d_model=4, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=2, d_ff=6, moe_d_ff=3,
    num_experts=2, experts_per_token=1, moe_layers=(1,), max_seq_len=8,
)  # fmt: skip


def refusal(**settings):
    with pytest.raises(InvalidConfig) as refused:
        TransformerConfig(**settings)
    return str(refused.value)


def test_defaults_are_those_of_the_reference_system():
    config = TransformerConfig()
    assert (config.vocab_size, config.d_model, config.n_layers) == (32_000, 512, 8)
    assert (config.n_heads, config.n_kv_heads, config.head_dim) == (8, 2, 64)
    assert (config.d_ff, config.moe_d_ff, config.max_seq_len) == (1408, 352, 2048)
    assert (config.num_experts, config.experts_per_token) == (8, 2)
    assert config.moe_layers == (2, 3, 4, 5, 6, 7)
    assert config.shared_expert is config.tie_embeddings is True
    assert (config.rope_base, config.rope_scaling, config.rmsnorm_eps) == (10_000.0, None, 1e-6)
    assert (config.aux_loss_weight, config.router_z_loss_weight) == (0.01, 1e-3)


# a setting that breaks each rule, in the order in which the rules are checked, and the complaint
BROKEN = [
    ("vocab_size", 0, "vocab_size must be above 0, got 0"),
    ("d_model", 0, "d_model must be above 0, got 0"),
    ("n_layers", 0, "n_layers must be above 0, got 0"),
    ("n_heads", 0, "n_heads must be above 0, got 0"),
    ("n_kv_heads", 0, "n_kv_heads must be above 0, got 0"),
    ("head_dim", 0, "head_dim must be above 0, got 0"),
    ("d_ff", 0, "d_ff must be above 0, got 0"),
    ("max_seq_len", 0, "max_seq_len must be above 0, got 0"),
    ("n_kv_heads", 3, "n_heads must be a multiple of n_kv_heads"),
    ("head_dim", 7, "head_dim must be even"),
    ("moe_layers", (1, 8), "moe_layers names layer 8, but n_layers is 8"),
    ("num_experts", 0, "num_experts must be above 0, got 0"),
    ("experts_per_token", 9, "experts_per_token must be from 1 to num_experts, which is 8; got 9"),
    ("moe_d_ff", 0, "moe_d_ff must be above 0, got 0"),
    ("rope_base", 0.0, "rope_base must be above 0, got 0"),
    ("rmsnorm_eps", 0.0, "rmsnorm_eps must be above 0, got 0"),
    ("aux_loss_weight", -0.5, "aux_loss_weight must not be negative, got -0.5"),
    ("router_z_loss_weight", -0.5, "router_z_loss_weight must not be negative, got -0.5"),
]
NAMES = [f"{name}={value}" for name, value, _ in BROKEN]


@pytest.mark.parametrize(("name", "value", "complaint"), BROKEN, ids=NAMES)
def test_a_broken_rule_is_named_with_its_value(name, value, complaint):
    said = refusal(**{name: value})
    assert said.startswith(complaint)
    assert str(value[-1] if name == "moe_layers" else value) in said


@pytest.mark.parametrize("first", range(len(BROKEN)), ids=NAMES)
def test_of_several_broken_rules_the_first_is_named(first):
    # reversed, so that of two values for one field the earlier rule's remains
    settings = {name: value for name, value, _ in reversed(BROKEN[first:])}
    assert refusal(**settings).startswith(BROKEN[first][2])


@pytest.mark.parametrize("name", [name for name, _, _ in BROKEN[:8]])
def test_a_negative_size_is_refused(name):
    assert refusal(**{name: -2}).startswith(f"{name} must be above 0, got -2")


@pytest.mark.parametrize("value", [0, -1, 9])
def test_a_token_uses_at_least_one_expert_and_at_most_all(value):
    assert refusal(experts_per_token=value).endswith(f"got {value}")
    assert TransformerConfig(experts_per_token=8).experts_per_token == 8


def test_both_head_counts_are_named():
    assert "8 and 3" in refusal(n_kv_heads=3)


@pytest.mark.parametrize("layer", [-1, 8])
def test_a_layer_that_does_not_exist_is_refused(layer):
    complaint = refusal(moe_layers=(layer,))
    assert complaint.startswith(f"moe_layers names layer {layer}, but n_layers is 8")
    assert "0 to 7" in complaint


def test_a_dense_model_needs_no_valid_experts():
    dense = TransformerConfig(moe_layers=(), num_experts=0, experts_per_token=0, moe_d_ff=0)
    assert not any(dense.is_moe(layer) for layer in range(dense.n_layers))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", 32_000.0),
        ("d_model", "512"),
        ("n_layers", True),
        ("d_ff", None),
        ("rope_base", "10000"),
        ("rope_base", True),
        ("rmsnorm_eps", math.nan),
        ("aux_loss_weight", math.inf),
        ("rope_base", 3.5e38),  # infinite once it is an FP32 in a file
        ("rope_base", 10**400),  # too large even for a Python float
        ("router_z_loss_weight", -math.inf),
        ("shared_expert", 1),
        ("tie_embeddings", "yes"),
        ("moe_layers", 3),
        ("moe_layers", None),
        ("moe_layers", "23"),
        ("moe_layers", (2.0,)),
        ("moe_layers", (True,)),
        ("rope_scaling", 4.0),
        ("rope_scaling", {"factor": 4.0}),
    ],
    ids=lambda x: str(x)[:12],
)
def test_a_value_of_another_kind_is_refused(name, value):
    complaint = refusal(**{name: value})
    assert complaint.startswith(f"{name} must")
    shown = value[0] if isinstance(value, tuple | str) and name == "moe_layers" else value
    assert repr(shown)[:20] in complaint


def test_moe_layers_may_be_any_collection_in_any_order():
    for layers in ([4, 2, 3], range(2, 5), {2, 3, 4}, (2, 2, 3, 4), iter([3, 2, 4])):
        config = TransformerConfig(moe_layers=layers)
        assert config.moe_layers == (2, 3, 4)
    assert [config.is_moe(layer) for layer in range(8)] == [False] * 2 + [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (1 / 3, 0.33333334),
        (0.1, 0.1),
        (1e-6, 1e-6),
        (10_000, 10_000.0),
        (500_000.123, 500_000.12),
        (16_777_217.0, 16_777_216.0),
        (3.4028235e38, 3.4028235e38),
    ],
)
def test_floats_are_kept_as_the_shortest_decimal_of_their_fp32(given, kept):
    base = TransformerConfig(rope_base=given).rope_base
    assert (base, type(base)) == (kept, float)
    assert LinearScaling(given).factor == kept


def test_the_shortest_decimal_is_that_of_numpy():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 0x7F80_0000, 3000, dtype=np.uint32)
    values = [*bits.view(np.float32), np.float32(1e-45), np.float32(0), np.float32(-0.3)]
    for value in values:
        assert float32(float(value)) == float(str(value))


def test_a_config_is_a_frozen_value():
    config = TransformerConfig(moe_layers=[2, 3])
    with pytest.raises(FrozenInstanceError):
        config.d_model = 64
    assert config == TransformerConfig(moe_layers=(3, 2), rope_base=10_000)
    assert len({config, TransformerConfig(moe_layers=range(2, 4)), TransformerConfig()}) == 2
    assert config != replace(config, d_model=64)
    with pytest.raises(InvalidConfig, match="d_model"):
        replace(config, d_model=0)


SENSELESS = {
    "factor=0": (lambda: LinearScaling(0.0), "factor must be above 0, got 0"),
    "factor=-2": (lambda: LinearScaling(-2.0), "factor must be above 0, got -2"),
    "factor=nan": (lambda: LinearScaling(math.nan), "factor must be"),
    "factor=inf": (lambda: LinearScaling(math.inf), "factor must be"),
    "factor=text": (lambda: LinearScaling("4"), "factor must be"),
    "llama-factor=0": (lambda: Llama3Scaling(0.0, 1.0, 4.0, 32), "factor must be above 0, got 0"),
    "low=0": (lambda: Llama3Scaling(8.0, 0.0, 4.0, 32), "low_freq_factor must be above 0, got 0"),
    "high=0": (lambda: Llama3Scaling(8.0, 1.0, 0.0, 32), "high_freq_factor must be above 0, got 0"),
    "high=inf": (lambda: Llama3Scaling(8.0, 1.0, math.inf, 32), "high_freq_factor must be"),
    "original=0": (
        lambda: Llama3Scaling(8.0, 1.0, 4.0, 0),
        "original_max_position_embeddings must",
    ),
    "original=32.5": (
        lambda: Llama3Scaling(8.0, 1.0, 4.0, 32.5),
        "original_max_position_embeddings must",
    ),
    "low=high": (
        lambda: Llama3Scaling(8.0, 4.0, 4.0, 32),
        "high_freq_factor must be above low_freq",
    ),
    "low>high": (
        lambda: Llama3Scaling(8.0, 4.0, 1.0, 32),
        "high_freq_factor must be above low_freq",
    ),
}


@pytest.mark.parametrize(("make", "complaint"), SENSELESS.values(), ids=SENSELESS)
def test_a_scaling_that_makes_no_sense_is_refused(make, complaint):
    with pytest.raises(InvalidConfig) as refused:
        make()
    assert str(refused.value).removeprefix("rope_scaling.").startswith(complaint)


def test_scalings_are_part_of_the_value():
    linear = TransformerConfig(rope_scaling=LinearScaling(4))
    assert linear.rope_scaling == LinearScaling(4.0)
    assert linear != TransformerConfig()
    llama = Llama3Scaling(8, 1, 4, 8192)
    assert (
        TransformerConfig(rope_scaling=llama).rope_scaling.original_max_position_embeddings == 8192
    )


def shapes(config):
    """Every matrix and vector of a model, and whether one token uses all of it."""
    d, hd = config.d_model, config.head_dim
    yield (config.vocab_size, d), 1
    for layer in range(config.n_layers):
        yield from (((d,), 1), ((config.n_heads * hd, d), 1), ((config.n_kv_heads * hd, d), 1))
        yield from (((config.n_kv_heads * hd, d), 1), ((d, config.n_heads * hd), 1), ((d,), 1))
        if layer not in config.moe_layers:
            yield from (((config.d_ff, d), 1), ((config.d_ff, d), 1), ((d, config.d_ff), 1))
            continue
        expert = [(config.moe_d_ff, d), (config.moe_d_ff, d), (d, config.moe_d_ff)]
        yield (config.num_experts, d), 1
        for index in range(config.num_experts):
            yield from ((shape, index < config.experts_per_token) for shape in expert)
        if config.shared_expert:
            yield from ((shape, 1) for shape in expert)
    yield (d,), 1
    if not config.tie_embeddings:
        yield (config.vocab_size, d), 1


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tie_embeddings": False},
        {"shared_expert": False},
        {"moe_layers": ()},
        {"moe_layers": (0, 1), "experts_per_token": 2},
        {"n_heads": 6, "n_kv_heads": 3, "head_dim": 4},
    ],
    ids=str,
)
def test_parameters_are_counted_tensor_by_tensor(settings):
    config = replace(TINY, **settings)
    counts = config.parameter_counts()
    assert counts.total == sum(math.prod(shape) for shape, _ in shapes(config))
    assert counts.active == sum(math.prod(shape) for shape, used in shapes(config) if used)


def test_the_model_of_the_documentation_has_its_real_size():
    counts = CHAPTER.parameter_counts()
    assert counts == (340_952_064, 199_394_304)
    assert str(counts) == "341.0M total / 199.4M active (1.71x)"
