"""expert_ffn and grouped_matmul: every row meets the weight of its own group."""

from functools import partial

import pytest
import torch
from numerics import assert_accurate, assert_twins, wide

from fastbrain.kernels import reference


def by_slot(x, w_gate_up, w_down, expert_ids, gates):
    """One token and one of its experts at a time."""
    rows, gate_up, down = wide(x), wide(w_gate_up), wide(w_down)
    out = []
    for t in range(len(x)):
        y = rows[t] * 0
        for j, e in enumerate(expert_ids[t].tolist()):
            if 0 <= e < len(gate_up):
                g, u = (gate_up[e] @ rows[t]).chunk(2)
                y = y + gates[t, j] * (down[e] @ (g / (1 + (-g).exp()) * u))
        out.append(y)
    return torch.stack(out).to(x.dtype)


def by_group(x, w, offsets):
    """One row at a time, with the weight of the group whose bounds it lies in."""
    rows, weights = wide(x), wide(w)
    out = []
    for m in range(len(x)):
        owners = [e for e in range(len(w)) if offsets[e] <= m < offsets[e + 1]]
        out.append(weights[owners[0]] @ rows[m] if owners else weights[0] @ rows[m] * 0)
    return torch.stack(out).to(x.dtype)


@pytest.fixture
def pair(twin):
    """An operation, and what it is held to: the reference to a definition, kernels to it."""
    definitions = {"expert_ffn": by_slot, "grouped_matmul": by_group}

    def make(name, **given):
        meaning = definitions[name] if twin is reference else getattr(reference, name)
        return partial(getattr(twin, name), **given), partial(meaning, **given)

    return make


@pytest.fixture
def widest(twin):
    """The dtype in which an implementation comes closest to its definition."""
    return torch.float64 if twin is reference else torch.float32


@pytest.fixture
def experts(randn):
    """Inputs of expert_ffn with gradients, for these ids."""

    def make(expert_ids, E=4, D=12, F=8):
        N, k = expert_ids.shape
        with torch.no_grad():
            w_gate_up, w_down = randn(E, 2 * F, D) / D**0.5, randn(E, D, F) / F**0.5
        return {
            "x": randn(N, D),
            "w_gate_up": w_gate_up.requires_grad_(),
            "w_down": w_down.requires_grad_(),
            "gates": torch.rand(N, k, device=expert_ids.device, requires_grad=True),
        }

    return make


ROUTES = {
    "one-token": [[2, 0]],
    "one-choice": [[3], [1], [3], [0], [2]],
    "every-expert": [[3, 1, 0, 2], [0, 1, 2, 3]],
    "idle-experts": [[1, 2], [2, 1], [1, 2]],
    "one-expert-takes-all": [[2, 2], [2, 2], [2, 2]],
    "a-repeated-choice": [[1, 1], [0, 3], [3, 3]],
    "some-skipped": [[0, -1], [4, 2], [-1, -1], [3, 1], [99, -7]],
    "all-skipped": [[-1, -1], [-1, 4]],
}


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_tokens_sum_their_experts_by_gate(pair, experts, tensor, route, widest):
    ids = tensor(route)
    assert_twins(*pair("expert_ffn", expert_ids=ids), experts(ids), widest, fp32=["gates"])


def test_many_tokens_sum_their_experts_by_gate(pair, experts, device, dtype):
    # experts with 1 row, with one short of a block of 64, a block and one more, and with none
    ids = torch.tensor([0] + [1] * 63 + [2] * 64 + [3] * 65 + [-1], device=device)
    ids = ids[torch.randperm(194, device=device)].view(97, 2)
    inputs = experts(ids, E=5)
    assert_twins(*pair("expert_ffn", expert_ids=ids), inputs, dtype, fp32=["gates"])


# a whole block in every direction, and several with the last cut short
@pytest.mark.parametrize(
    "shape",
    [pytest.param((128, 128), marks=pytest.mark.slow), (136, 72)],
    ids=["D128-F128", "D136-F72"],
)
def test_wide_experts_sum_by_gate(pair, experts, device, dtype, shape):
    ids = torch.randint(-1, 3, (20, 2), device=device)
    inputs = experts(ids, 2, *shape)
    assert_twins(*pair("expert_ffn", expert_ids=ids), inputs, dtype, fp32=["gates"])


def test_slopes_are_the_gradients_of_expert_ffn(experts, tensor):
    ids = tensor([[0, 2], [-1, 1], [2, 2]])
    inputs = experts(ids, E=3, D=3, F=2).values()
    inputs = [x.detach().double().requires_grad_() for x in inputs]

    def op(x, w_gate_up, w_down, gates):
        return reference.expert_ffn(x, w_gate_up, w_down, ids, gates)

    assert torch.autograd.gradcheck(op, inputs)


def test_shadows_are_multiplied_and_masters_get_the_gradient(twin, experts, tensor):
    ids = tensor([[0, 3], [1, -1], [3, 1]])
    inputs = experts(ids)
    # unlike the masters, so that it shows which of the two was used
    shadows = tuple((3 * inputs[n].detach()).bfloat16() for n in ("w_gate_up", "w_down"))

    def definition(x, w_gate_up, w_down, gates):
        if twin is not reference:
            wide_shadows = tuple(shadow.to(x.dtype) for shadow in shadows)
            return reference.expert_ffn(x, w_gate_up, w_down, ids, gates, wide_shadows)
        gate_up, down = (
            master + (shadow.to(master.dtype) - master).detach()
            for master, shadow in zip((w_gate_up, w_down), shadows, strict=True)
        )
        return by_slot(x, gate_up, down, ids, gates)

    def op(x, w_gate_up, w_down, gates):
        return twin.expert_ffn(x, w_gate_up, w_down, ids, gates, shadows)

    masters = ["w_gate_up", "w_down", "gates"]
    assert_twins(op, definition, inputs, torch.bfloat16, fp32=masters)


@pytest.mark.parametrize("skipped", [-1, 4, -100, 2**31 - 1])
def test_a_skipped_choice_leaves_no_trace(twin, experts, tensor, skipped):
    ids = tensor([[skipped, skipped], [1, skipped], [skipped, 2]])
    inputs = experts(ids)
    y = twin.expert_ffn(**inputs, expert_ids=ids)
    y.backward(torch.randn_like(y))
    assert y[0].count_nonzero() == inputs["x"].grad[0].count_nonzero() == 0
    gates = inputs["gates"].grad
    assert torch.equal(gates != 0, (ids >= 0) & (ids < 4))


def test_padding_may_hold_anything(twin, experts, tensor):
    # a row without experts, and a gate without one, are never used: 0 times infinity is not 0
    ids = tensor([[0, 1], [-1, -1], [2, -1]])
    inputs = experts(ids)
    expected = {n: x.detach().clone().requires_grad_() for n, x in inputs.items()}
    with torch.no_grad():
        inputs["x"][1] = float("nan")
        inputs["gates"][1] = float("inf")
        inputs["gates"][2, 1] = float("nan")
    ours = twin.expert_ffn(**inputs, expert_ids=ids)
    theirs = twin.expert_ffn(**expected, expert_ids=ids)
    incoming = torch.randn_like(ours)
    ours.backward(incoming)
    theirs.backward(incoming)
    assert torch.equal(ours, theirs)
    for name, x in inputs.items():
        assert torch.equal(x.grad, expected[name].grad)


@pytest.mark.parametrize("route", ["idle-experts", "one-expert-takes-all", "all-skipped"])
def test_idle_experts_get_exactly_zero(twin, experts, tensor, route):
    ids = tensor(ROUTES[route])
    inputs = experts(ids)
    twin.expert_ffn(**inputs, expert_ids=ids).square().sum().backward()
    for e in range(4):
        used = bool((ids == e).any())
        for name in ("w_gate_up", "w_down"):
            assert bool(inputs[name].grad[e].count_nonzero()) == used


def test_a_repeated_choice_counts_twice(twin, experts, tensor):
    op = partial(twin.expert_ffn, expert_ids=tensor([[1, 1], [0, 0]]))

    def once(x, w_gate_up, w_down, gates):
        total = gates.sum(1, keepdim=True)
        return reference.expert_ffn(x, w_gate_up, w_down, tensor([[1], [0]]), total)

    assert_twins(op, once, experts(tensor([[1, 1], [0, 0]])), torch.float32)


def test_a_gate_of_zero_still_has_its_gradient(twin, pair, experts, tensor):
    ids = tensor([[0, 3], [2, 1]])
    inputs = experts(ids)
    with torch.no_grad():
        inputs["gates"][:, 1] = 0
    assert_twins(*pair("expert_ffn", expert_ids=ids), inputs, torch.float32)
    twin.expert_ffn(**inputs, expert_ids=ids).sum().backward()
    assert inputs["gates"].grad.all()


def test_permuted_tokens_give_permuted_rows(twin, experts, device):
    ids = torch.randint(-1, 4, (40, 2), device=device)
    order = torch.randperm(40, device=device)

    def permuted(x, w_gate_up, w_down, gates):
        y = twin.expert_ffn(x[order], w_gate_up, w_down, ids[order], gates[order])
        return y[order.argsort()]

    definition = partial(reference.expert_ffn, expert_ids=ids)
    assert_twins(permuted, definition, experts(ids), torch.float32)


def test_ids_may_have_either_width(twin, experts, tensor):
    ids = tensor([[0, 2], [1, -1]])
    inputs = experts(ids)
    narrow = twin.expert_ffn(**inputs, expert_ids=ids.int())
    assert torch.equal(twin.expert_ffn(**inputs, expert_ids=ids), narrow)


OFFSETS = {
    "even": [0, 3, 6, 9],
    "uneven": [0, 1, 8, 9],
    "first-and-last-empty": [0, 0, 9, 9],
    "middle-empty": [0, 4, 4, 9],
    "rows-left-over": [0, 2, 5, 6],
    "all-left-over": [0, 0, 0, 0],
}


@pytest.mark.parametrize("bounds", OFFSETS.values(), ids=OFFSETS)
def test_rows_meet_the_weight_of_their_group(pair, randn, tensor, bounds, widest):
    op, definition = pair("grouped_matmul", offsets=tensor(bounds, dtype=torch.int32))
    assert_twins(op, definition, {"x": randn(9, 5), "w": randn(3, 7, 5)}, widest)


@pytest.mark.parametrize("shape", [(128, 128), (136, 72)], ids=["D128-O128", "D72-O136"])
def test_many_rows_meet_the_weight_of_their_group(pair, randn, tensor, dtype, shape):
    # groups of 64 rows and of one more, an empty one, and rows left over
    op, definition = pair("grouped_matmul", offsets=tensor([0, 64, 64, 129], dtype=torch.int32))
    assert_twins(op, definition, {"x": randn(140, shape[1]), "w": randn(3, *shape)}, dtype)


def test_slopes_are_the_gradients_of_grouped_matmul(randn, tensor):
    offsets = tensor([0, 2, 2, 4], dtype=torch.int32)
    x, w = (a.detach().double().requires_grad_() for a in (randn(5, 3), randn(3, 2, 3)))
    assert torch.autograd.gradcheck(lambda x, w: reference.grouped_matmul(x, w, offsets), (x, w))


def test_a_shadow_is_multiplied_and_its_master_gets_the_gradient(twin, randn, tensor):
    offsets = tensor([0, 2, 2, 7], dtype=torch.int32)
    w = randn(3, 7, 5)
    shadow = (3 * w.detach()).bfloat16()

    def definition(x, w):
        if twin is not reference:
            return reference.grouped_matmul(x, w, offsets, shadow.to(x.dtype))
        return by_group(x, w + (shadow.to(w.dtype) - w).detach(), offsets)

    op = partial(twin.grouped_matmul, offsets=offsets, shadow=shadow)
    assert_twins(op, definition, {"x": randn(9, 5), "w": w}, torch.bfloat16, fp32=["w"])


def test_it_stands_in_for_the_product_of_pytorch(twin, randn, tensor):
    x, w = (v.detach().bfloat16() for v in (randn(9, 16), randn(3, 8, 16)))
    offsets = tensor([0, 2, 2, 9], dtype=torch.int32)
    ours = twin.grouped_matmul(x, w, offsets)
    theirs = torch.nn.functional.grouped_mm(x, w.mT, offs=offsets[1:])
    assert_accurate(ours, theirs, by_group(x.double(), w.double(), offsets), torch.bfloat16)


def test_rows_past_the_last_group_are_zero_whatever_they_hold(twin, randn, tensor):
    x, w = randn(9, 5), randn(2, 7, 5)
    with torch.no_grad():
        x[6:] = float("nan")
    y = twin.grouped_matmul(x, w, tensor([0, 3, 6], dtype=torch.int32))
    incoming = torch.randn_like(y)
    incoming[6:] = float("inf")
    y.backward(incoming)
    assert y[6:].count_nonzero() == x.grad[6:].count_nonzero() == 0
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert w.grad.isfinite().all()


def test_empty_groups_get_exactly_zero(twin, randn, tensor):
    w = randn(4, 7, 5)
    twin.grouped_matmul(randn(6, 5), w, tensor([0, 0, 4, 4, 4], dtype=torch.int32)).sum().backward()
    assert [bool(dw.any()) for dw in w.grad] == [False, True, False, False]
