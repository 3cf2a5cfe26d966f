"""Wrong arguments are refused before anything is computed, by name, value and rule."""

from functools import partial

import pytest
import torch

from fastbrain import kernels
from fastbrain.kernels import AdamScalars

WHOLE = torch.int64
NARROW = torch.bfloat16
HALF = torch.float16


def z(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def attention(q=None, k=None, v=None, segments=None):
    q = z(2, 3, 4, 6) if q is None else q
    k = z(2, 3, 2, 6) if k is None else k
    return kernels.causal_attention(q, k, k if v is None else v, segments=segments)


def rotary(q=None, k=None, cos=None, sin=None, **given):
    cos = z(9, 3) if cos is None else cos
    q, k = z(2, 3, 4, 6) if q is None else q, z(2, 3, 2, 6) if k is None else k
    return kernels.rotary(q, k, cos, cos if sin is None else sin, **given)


EXPERTS = {"x": (5, 6), "w_gate_up": (3, 8, 6), "w_down": (3, 6, 4), "gates": (5, 2)}


def experts(**given):
    fitting = {name: z(*shape) for name, shape in EXPERTS.items()}
    fitting["expert_ids"] = z(5, 2, dtype=WHOLE)
    return kernels.expert_ffn(**fitting | given)


def narrow_experts(gate_up, down):
    x = z(5, 6, dtype=NARROW)
    return experts(x=x, shadows=(gate_up, down))


def grouped(**given):
    fitting = {"x": z(5, 6), "w": z(3, 4, 6), "offsets": z(4, dtype=torch.int32)}
    return kernels.grouped_matmul(**fitting | given)


def masked(**given):
    fitting = {"logits": z(5, 7), "targets": z(5, dtype=WHOLE), "mask": z(5, dtype=torch.bool)}
    return kernels.masked_cross_entropy(**fitting | given)


def head(**given):
    fitting = {"hidden": z(5, 6), "weight": z(7, 6)}
    labels = {"targets": z(5, dtype=WHOLE), "mask": z(5, dtype=torch.bool)}
    return kernels.linear_cross_entropy(**fitting | labels | given)


def norm(**given):
    return kernels.rms_norm(**{"x": z(5, 6), "weight": z(6), "eps": 1e-6} | given)


def adam(scalars=None, **given):
    fitting = {name: [z(2, 3)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
    fitting |= {"shadows": [z(2, 3, dtype=NARROW)], "weight_decays": [0.0]}
    rates = {n: torch.tensor(1.0) for n in ("lr", "grad_scale", "clip")}
    counts = {"step": torch.tensor(0), "skip": torch.tensor(0, dtype=torch.int32)}
    scalars = AdamScalars(**rates | counts | (scalars or {}))
    return kernels.adam_step(**fitting | given, scalars=scalars, betas=(0.9, 0.99), eps=1e-8)


linear, swiglu, grad_norm = kernels.linear, kernels.swiglu, kernels.grad_norm

# what is called, and what the message must say: argument, rule and value
REFUSED = [
    (partial(attention, q=z(2, 3, 4, 6, dtype=WHOLE)), "q must be", "int64"),
    (partial(attention, q=z(2, 3, 4, 6, dtype=HALF)), "q must be", "float16"),
    (partial(attention, k=z(2, 3, 2, 6, dtype=NARROW)), "k must be", "bfloat16"),
    (partial(attention, v=z(2, 3, 2, 6, dtype=NARROW)), "v must be", "bfloat16"),
    (partial(attention, q=z(2, 3, 24)), "q must have 4 dimensions", "(2, 3, 24)"),
    (partial(attention, v=z(2, 3, 12)), "v must have 4 dimensions", "(2, 3, 12)"),
    (partial(attention, k=z(2, 5, 2, 6)), "k must have q's batch, length", "(2, 5, 2, 6)"),
    (partial(attention, k=z(1, 3, 2, 6)), "k must have q's batch, length", "(1, 3, 2, 6)"),
    (partial(attention, k=z(2, 3, 2, 8)), "k must have q's batch, length", "(2, 3, 2, 8)"),
    (partial(attention, v=z(2, 3, 4, 6)), "v must have k's shape", "(2, 3, 4, 6)"),
    (partial(attention, k=z(2, 3, 3, 6)), "multiple of key-value heads", "4 and 3"),
    (partial(attention, k=z(2, 3, 0, 6)), "multiple of key-value heads", "4 and 0"),
    (partial(attention, q=z(2, 3, 4, 5), k=z(2, 3, 4, 5)), "head width must be even", "5"),
    (partial(attention, segments=z(2, 4, dtype=torch.int32)), "segments must", "(2, 4)"),
    (partial(attention, segments=z(2, 3, dtype=WHOLE)), "segments must be int32", "int64"),
    (partial(rotary, q=z(2, 3, 4, 6, dtype=WHOLE)), "q must be", "int64"),
    (partial(rotary, k=z(2, 3, 2, 6, dtype=HALF)), "k must be", "float16"),
    (partial(rotary, q=z(2, 3, 24)), "q must have 4 dimensions", "(2, 3, 24)"),
    (partial(rotary, k=z(2, 4, 2, 6)), "k must have q's batch, length", "(2, 4, 2, 6)"),
    (partial(rotary, q=z(2, 3, 4, 5), k=z(2, 3, 4, 5)), "head width must be even", "5"),
    (partial(rotary, cos=z(27)), "cos must have 2 dimensions", "(27,)"),
    (partial(rotary, cos=z(9, 6)), "cos must have one column per pair", "(9, 6)"),
    (partial(rotary, cos=z(9, 3, dtype=WHOLE)), "cos must be", "int64"),
    (partial(rotary, sin=z(9, 3, dtype=NARROW)), "sin must be", "bfloat16"),
    (partial(rotary, sin=z(8, 3)), "sin must have cos's shape", "(8, 3)"),
    (partial(rotary, positions=z(3, dtype=WHOLE)), "positions must place every token", "(3,)"),
    (partial(rotary, positions=z(2, 3)), "positions must be int32 or int64", "float32"),
    (partial(rotary, offset=7), "offset + length must lie in 0 to 9", "7 + 3"),
    (partial(rotary, offset=-1), "offset + length must lie in 0 to 9", "-1 + 3"),
    (partial(experts, x=z(5, 6, dtype=HALF)), "x must be", "float16"),
    (partial(experts, x=z(6)), "x must have 2 dimensions", "(6,)"),
    (partial(experts, w_gate_up=z(8, 6)), "w_gate_up must have 3 dimensions", "(8, 6)"),
    (partial(experts, w_down=z(6, 4)), "w_down must have 3 dimensions", "(6, 4)"),
    (partial(experts, w_gate_up=z(3, 7, 6)), "w_gate_up must hold gate and up rows", "7"),
    (partial(experts, w_gate_up=z(3, 8, 5)), "w_gate_up must take rows of x's width", "(3, 8, 5)"),
    (partial(experts, w_down=z(3, 4, 6)), "w_down must map the hidden width back", "(3, 4, 6)"),
    (partial(experts, w_down=z(2, 6, 4)), "w_down must map the hidden width back", "(2, 6, 4)"),
    (partial(experts, expert_ids=z(5, dtype=WHOLE)), "expert_ids must have 2 dimensions", "(5,)"),
    (partial(experts, expert_ids=z(4, 2, dtype=WHOLE)), "expert_ids must have a row", "(4, 2)"),
    (partial(experts, expert_ids=z(5, 2)), "expert_ids must be int32 or int64", "float32"),
    (
        partial(experts, expert_ids=z(5, 0, dtype=WHOLE), gates=z(5, 0)),
        "expert_ids must name at least 1 expert",
        "(5, 0)",
    ),
    (partial(masked, logits=z(5, 0)), "logits must have a vocabulary of at least 1", "(5, 0)"),
    (partial(head, weight=z(0, 6)), "weight must have a vocabulary of at least 1", "(0, 6)"),
    (partial(experts, gates=z(5, 3)), "gates must have the shape of expert_ids", "(5, 3)"),
    (partial(experts, gates=z(5, 2, dtype=NARROW)), "gates must be float32", "bfloat16"),
    (partial(experts, w_down=z(3, 6, 4, dtype=NARROW)), "w_down must be float32", "bfloat16"),
    (
        partial(narrow_experts, z(3, 8, 6), z(3, 6, 4, dtype=NARROW)),
        "w_gate_up's shadow",
        "float32",
    ),
    (partial(narrow_experts, z(3, 8, 6, dtype=NARROW), z(3, 6, 5)), "w_down's shadow", "(3, 6, 5)"),
    (partial(grouped, x=z(5, 6, dtype=WHOLE)), "x must be", "int64"),
    (partial(grouped, x=z(6)), "x must have 2 dimensions", "(6,)"),
    (partial(grouped, w=z(4, 6)), "w must have 3 dimensions", "(4, 6)"),
    (partial(grouped, w=z(3, 4, 5)), "w must take rows of x's width", "(3, 4, 5)"),
    (partial(grouped, w=z(3, 4, 6, dtype=NARROW)), "w must be float32", "bfloat16"),
    (partial(grouped, offsets=z(3, dtype=torch.int32)), "offsets must bound every group", "(3,)"),
    (partial(grouped, offsets=z(4, dtype=WHOLE)), "offsets must be int32", "int64"),
    (partial(grouped, shadow=z(3, 4, 6, dtype=NARROW)), "w's shadow must be float32", "bfloat16"),
    (partial(grouped, shadow=z(3, 6, 4)), "w's shadow must have its master's shape", "(3, 6, 4)"),
    (partial(linear, z(5, 6), z(7)), "weight must have 2 dimensions", "(7,)"),
    (partial(linear, z(5, 6), z(7, 5)), "weight must take rows of x's width 6", "(7, 5)"),
    (partial(linear, z(5, 6), z(7, 6, dtype=NARROW)), "weight must be float32", "bfloat16"),
    (partial(linear, z(5, 6, dtype=NARROW), z(7, 6)), "weight must be bfloat16", "float32"),
    (partial(linear, z(5, 6, dtype=HALF), z(7, 6)), "x must be", "float16"),
    (partial(linear, z(), z(7, 6)), "x must have", "()"),
    (
        partial(linear, z(5, 6, dtype=NARROW), z(7, 6), z(7, 6)),
        "weight's shadow must be",
        "float32",
    ),
    (
        partial(linear, z(5, 6, dtype=NARROW), z(7, 6, dtype=HALF), z(7, 6, dtype=NARROW)),
        "weight must be float32",
        "float16",
    ),
    (partial(masked, logits=z(5, 7, dtype=HALF)), "logits must be", "float16"),
    (partial(masked, logits=z(5, 1, 7)), "logits must have 2 dimensions", "(5, 1, 7)"),
    (partial(masked, targets=z(4, dtype=WHOLE)), "targets must have one entry per row", "(4,)"),
    (partial(masked, targets=z(5, dtype=torch.int32)), "targets must be int64", "int32"),
    (partial(masked, mask=z(5, 1, dtype=torch.bool)), "mask must have one entry per row", "(5, 1)"),
    (partial(masked, mask=z(5)), "mask must be bool", "float32"),
    (partial(head, hidden=z(5, 1, 6)), "hidden must have 2 dimensions", "(5, 1, 6)"),
    (partial(head, weight=z(7, 5)), "weight must take rows of hidden's width 6", "(7, 5)"),
    (partial(head, weight=z(7, 6, dtype=NARROW)), "weight must be float32", "bfloat16"),
    (partial(head, hidden=z(5, 6, dtype=HALF)), "hidden must be", "float16"),
    (partial(head, targets=z(5)), "targets must be int64", "float32"),
    (partial(head, mask=z(6, dtype=torch.bool)), "mask must have one entry per row", "(6,)"),
    (partial(head, shadow=z(6, 7)), "weight's shadow must have its master's shape", "(6, 7)"),
    (partial(head, chunk=0), "chunk must be at least 1", "0"),
    (partial(head, max_rows=-1), "max_rows must not be negative", "-1"),
    (partial(norm, x=z(5, 6, dtype=HALF)), "x must be", "float16"),
    (partial(norm, x=z(6)), "x must have 2 dimensions", "(6,)"),
    (partial(norm, weight=z(5)), "weight must have one entry per column of x", "(5,)"),
    (partial(norm, weight=z(6, dtype=NARROW)), "weight must be float32", "bfloat16"),
    (partial(norm, residual=z(4, 6)), "residual must have x's shape", "(4, 6)"),
    (partial(norm, residual=z(5, 6, dtype=HALF)), "residual must be", "float16"),
    (partial(norm, dtype=HALF), "dtype must be one of", "float16"),
    (partial(swiglu, z(5, 7)), "gate_up must hold gate and up halves", "7"),
    (partial(swiglu, z(5, 6, dtype=HALF)), "gate_up must be", "float16"),
    (partial(swiglu, z()), "gate_up must", "()"),
    (partial(grad_norm, [z(3), z(3, dtype=WHOLE)]), "grads[1] must be", "int64"),
    (partial(adam, grads=[]), "grads must have one entry per parameter", "1, got 0"),
    (partial(adam, exp_avgs=[]), "exp_avgs must have one entry per parameter", "1, got 0"),
    (partial(adam, exp_avg_sqs=[]), "exp_avg_sqs must have one entry per parameter", "1, got 0"),
    (partial(adam, shadows=[]), "shadows must have one entry per parameter", "1, got 0"),
    (partial(adam, weight_decays=[0, 0]), "weight_decays must have one entry", "1, got 2"),
    (partial(adam, params=[z(2, 3, dtype=NARROW)]), "params[0] must be float32", "bfloat16"),
    (partial(adam, grads=[z(3, 2)]), "grads[0] must have its parameter's shape", "(3, 2)"),
    (partial(adam, grads=[z(2, 3, dtype=HALF)]), "grads[0] must be", "float16"),
    (partial(adam, exp_avgs=[z(3)]), "exp_avgs[0] must have its parameter's shape", "(3,)"),
    (partial(adam, exp_avgs=[z(2, 3, dtype=NARROW)]), "exp_avgs[0] must be float32", "bfloat16"),
    (partial(adam, exp_avg_sqs=[z(3)]), "exp_avg_sqs[0] must have its parameter's", "(3,)"),
    (partial(adam, shadows=[z(3, dtype=NARROW)]), "shadows[0] must have its parameter's", "(3,)"),
    (partial(adam, shadows=[z(2, 3)]), "shadows[0] must be bfloat16", "float32"),
    (partial(adam, params=[z(3, 2).T]), "params[0] must be contiguous", "(1, 2)"),
    (partial(adam, grads=[z(3, 2).T]), "grads[0] must be contiguous", "(1, 2)"),
    (partial(adam, exp_avgs=[z(3, 2).T]), "exp_avgs[0] must be contiguous", "(1, 2)"),
    (partial(adam, exp_avg_sqs=[z(3, 2).T]), "exp_avg_sqs[0] must be contiguous", "(1, 2)"),
    (partial(adam, shadows=[z(3, 2, dtype=NARROW).T]), "shadows[0] must be contiguous", "(1, 2)"),
    (partial(adam, {"lr": z(1)}), "lr must have 0 dimensions", "(1,)"),
    (partial(adam, {"clip": z(dtype=NARROW)}), "clip must be float32", "bfloat16"),
    (partial(adam, {"step": z()}), "step must be int64", "float32"),
    (partial(adam, {"skip": z(dtype=torch.bool)}), "skip must be int32", "bool"),
]


NAMES = [f"{call.func.__name__}: {rule}, {value}" for call, rule, value in REFUSED]


@pytest.mark.parametrize(("call", "rule", "value"), REFUSED, ids=NAMES)
def test_a_wrong_argument_is_refused_by_name_value_and_rule(call, rule, value):
    with pytest.raises(ValueError, match="must") as refused:
        call()
    assert rule in str(refused.value)
    assert value in str(refused.value).partition(rule)[2]


@pytest.mark.parametrize("operation", ["attention", "experts", "masked", "norm"])
def test_the_kernels_refuse_fp64(operation):
    wide = {
        "attention": partial(attention, *(z(1, 3, 2, 16, dtype=torch.float64) for _ in range(3))),
        "experts": partial(
            experts,
            **{n: z(*shape, dtype=torch.float64) for n, shape in EXPERTS.items()},
        ),
        "masked": partial(masked, logits=z(5, 7, dtype=torch.float64)),
        "norm": partial(norm, x=z(5, 6, dtype=torch.float64)),
    }[operation]
    wide()
    with kernels.use(kernels.fused), pytest.raises(ValueError, match="takes no float64"):
        wide()


@pytest.mark.parametrize(
    "call",
    [attention, rotary, experts, grouped, masked, head, norm, adam],
    ids=lambda f: f.__name__,
)
def test_the_calls_that_these_spoil_are_right(call):
    call()
