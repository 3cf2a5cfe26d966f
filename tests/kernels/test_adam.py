"""adam_step and grad_norm: the update formula, and the numbers that steer it."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from numerics import assert_accurate

from fastbrain.kernels import AdamScalars

LISTS = ("params", "grads", "exp_avgs", "exp_avg_sqs", "shadows")


@dataclass
class Case:
    """Everything that a step of Adam reads and writes."""

    params: list
    grads: list
    exp_avgs: list
    exp_avg_sqs: list
    shadows: list
    weight_decays: list
    lr: float = 1e-3
    grad_scale: float = 1.0
    clip: float = 1.0
    step: int = 0
    skip: int = 0
    betas: tuple = (0.9, 0.999)
    eps: float = 1e-8

    def copy(self, dtype=None):
        """The same numbers elsewhere; `dtype` is that of everything but the shadows."""
        lists = {name: [x.detach().clone() for x in getattr(self, name)] for name in LISTS}
        for name in LISTS[:-1] if dtype else ():
            lists[name] = [x.to(dtype) for x in lists[name]]
        return replace(self, **lists)

    def stepped(self, twin):
        """A copy after one step."""
        after = self.copy()
        after.run(twin)
        return after

    def run(self, twin):
        device = self.params[0].device
        scalars = AdamScalars(
            *(torch.tensor(getattr(self, n), device=device) for n in ("lr", "grad_scale", "clip")),
            torch.tensor(self.step, device=device),
            torch.tensor(self.skip, dtype=torch.int32, device=device),
        )
        twin.adam_step(
            *(getattr(self, name) for name in LISTS),
            scalars,
            betas=self.betas,
            eps=self.eps,
            weight_decays=self.weight_decays,
        )
        self.step = int(scalars.step)

    def bits(self):
        """Every tensor and the count, as bytes that can be compared, NaN included."""
        tensors = [x for name in LISTS for x in getattr(self, name)]
        return [x.contiguous().view(torch.uint8).tolist() for x in tensors if x.dim()], self.step


def by_formula(case):
    """The case after one step as the papers write it, in the dtype of the parameters."""
    b1, b2 = case.betas
    t = case.step + 1
    lr, factor = rounded(case.lr), rounded(case.grad_scale) * rounded(case.clip)
    after = case.copy()
    for i, decay in enumerate(case.weight_decays):
        p, g = case.params[i], case.grads[i]
        g = (g.to(p.dtype) if g.numel() else torch.zeros_like(p)) * factor
        m = b1 * case.exp_avgs[i] + (1 - b1) * g
        v = b2 * case.exp_avg_sqs[i] + (1 - b2) * g**2
        p = p - lr * decay * p
        p = p - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + case.eps)
        after.params[i], after.exp_avgs[i], after.exp_avg_sqs[i] = p, m, v
    return after


def rounded(value):
    """The scalars are FP32 on the device."""
    return float(torch.tensor(value, dtype=torch.float32))


def assert_formula(twin, case, dtype=torch.float32):
    case = case.copy(dtype)
    ours, theirs, exact = case.stepped(twin), by_formula(case), by_formula(case.copy(torch.float64))
    assert ours.step == case.step + 1
    for name in ("params", "exp_avgs", "exp_avg_sqs"):
        for mine, plain, truth in zip(
            *(getattr(c, name) for c in (ours, theirs, exact)), strict=True
        ):
            assert_accurate(mine, plain, truth, dtype, name=name)


@pytest.fixture
def case(device):
    """Parameters as small as an update, so that an error in the update is no small error."""

    def make(*shapes, **settings):
        shapes = shapes or ((5, 3), (7,))
        randn = [
            [torch.randn(shape, device=device) for shape in shapes] for _ in ("p", "g", "m", "v")
        ]
        n = len(shapes)
        defaults = {
            "params": [1e-3 * p for p in randn[0]],
            "grads": randn[1],
            "exp_avgs": [0.1 * m for m in randn[2]],
            "exp_avg_sqs": [0.01 * v**2 for v in randn[3]],
            "shadows": [torch.zeros(s, dtype=torch.bfloat16, device=device) for s in shapes],
            "weight_decays": [0.0] * n,
        }
        return Case(**defaults | settings)

    return make


FP64_AND_FP32 = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


@FP64_AND_FP32
@pytest.mark.parametrize("step", [0, 1, 49_999])
def test_a_step_is_the_formula(twin, case, step, dtype):
    assert_formula(twin, case(step=step, weight_decays=[0.1, 0.3]), dtype)


@FP64_AND_FP32
def test_the_first_step_from_zero_moments_is_the_formula(twin, case, dtype):
    # 1 - 0.999 in FP32 is off by 1.3e-5, and here it cancels only if both sides have it
    fresh = case()
    fresh.exp_avgs = [torch.zeros_like(m) for m in fresh.exp_avgs]
    fresh.exp_avg_sqs = [torch.zeros_like(v) for v in fresh.exp_avg_sqs]
    assert_formula(twin, fresh, dtype)


@FP64_AND_FP32
def test_betas_and_eps_are_those_given(twin, case, dtype):
    assert_formula(twin, case(betas=(0.5, 0.8), eps=0.3, step=2), dtype)


@FP64_AND_FP32
def test_gradients_are_scaled_and_clipped(twin, case, dtype):
    assert_formula(twin, case(grad_scale=0.3, clip=0.7, step=2), dtype)


def test_scaling_by_powers_of_two_equals_scaled_gradients(twin, case):
    scaled = case(grad_scale=0.25, clip=0.5)
    before = scaled.copy()
    ready = replace(before, grads=[g / 8 for g in before.grads], grad_scale=1.0, clip=1.0)
    ours, theirs = scaled.stepped(twin), ready.stepped(twin)
    assert [g.tolist() for g in ours.grads] == [g.tolist() for g in before.grads]  # only read
    assert replace(ours, grads=[]).bits() == replace(theirs, grads=[]).bits()


def test_each_parameter_decays_at_its_own_rate(twin, case):
    decayed = case((4,), (4,), weight_decays=[0.5, 0.0], lr=0.25)
    decayed.grads = [torch.zeros_like(g) for g in decayed.grads]
    decayed.exp_avgs = [torch.zeros_like(m) for m in decayed.exp_avgs]
    after = decayed.stepped(twin)
    assert torch.equal(after.params[0], decayed.params[0] * (1 - 0.25 * 0.5))
    assert torch.equal(after.params[1], decayed.params[1])


@pytest.mark.parametrize("size", [1, 7, 1023, 1024, 1025])
def test_neighbors_in_memory_are_untouched(twin, device, size):
    # a guard of NaN around every tensor, 16 bytes from its ends
    buffers = {
        name: torch.full((size + 16,), float("nan"), device=device).to(
            torch.bfloat16 if name == "shadows" else torch.float32
        )
        for name in LISTS
    }
    views = {name: buffer[8 : size + 8] for name, buffer in buffers.items()}
    for view in views.values():
        view.copy_(torch.rand(size, device=device))
    guarded = Case(**{n: [v] for n, v in views.items()}, weight_decays=[0.1], step=3)
    expected = by_formula(guarded.copy(torch.float64))
    theirs = by_formula(guarded)
    guarded.run(twin)
    assert_accurate(views["params"], theirs.params[0], expected.params[0], torch.float32)
    for buffer in buffers.values():
        assert buffer[:8].isnan().all()
        assert buffer[size + 8 :].isnan().all()
        assert buffer[8 : size + 8].isfinite().all()


def test_an_absent_gradient_is_zero(twin, case):
    absent = case(weight_decays=[0.1, 0.2], step=4)
    absent.grads[1] = torch.empty(0, device=absent.params[0].device)
    zero = absent.copy()
    zero.grads[1] = torch.zeros_like(zero.params[1])
    ours, theirs = absent.stepped(twin), zero.stepped(twin)
    assert replace(ours, grads=[]).bits() == replace(theirs, grads=[]).bits()
    assert not torch.equal(ours.exp_avgs[1], absent.exp_avgs[1])
    assert not torch.equal(ours.params[1], absent.params[1])


def test_an_absent_shadow_changes_nothing_else(twin, case):
    absent = case(step=4)
    absent.shadows[0] = torch.empty(0, dtype=torch.bfloat16, device=absent.params[0].device)
    present = case(step=4, **{n: getattr(absent, n) for n in LISTS[:-1]})
    ours, theirs = absent.stepped(twin), present.stepped(twin)
    assert torch.equal(ours.shadows[1], theirs.shadows[1])
    assert replace(ours, shadows=[]).bits() == replace(theirs, shadows=[]).bits()


def test_a_shadow_is_the_new_parameter_rounded(twin, case):
    before = case((300,))
    after = before.stepped(twin)
    assert torch.equal(after.shadows[0], after.params[0].bfloat16())
    assert not torch.equal(after.shadows[0], before.params[0].bfloat16())


def test_bf16_gradients_are_read_exactly(twin, case):
    narrow = case(grad_scale=0.3)
    narrow.grads = [g.bfloat16() for g in narrow.grads]
    equal = narrow.copy()
    equal.grads = [g.float() for g in narrow.grads]
    ours, theirs = narrow.stepped(twin), equal.stepped(twin)
    assert replace(ours, grads=[]).bits() == replace(theirs, grads=[]).bits()


@pytest.mark.parametrize("skip", [1, 2, -1])
@pytest.mark.parametrize("broken", [1.0, float("nan"), float("inf")])
def test_a_skipped_step_changes_no_bit(twin, case, skip, broken):
    skipped = case(skip=skip, step=5, weight_decays=[0.1, 0.1])
    skipped.grads[0].mul_(broken)
    assert skipped.stepped(twin).bits() == skipped.bits()


def test_parameters_that_want_a_gradient_are_updated_in_place(twin, case):
    wanting = case((4,))
    expected = wanting.stepped(twin)
    wanting.params[0].requires_grad_()
    wanting.run(twin)
    assert torch.equal(wanting.params[0].detach(), expected.params[0])
    assert wanting.params[0].is_leaf


@FP64_AND_FP32
def test_thirty_steps_follow_pytorch(twin, case, dtype):
    ours = case((6, 4), (5,), lr=2.0**-7, weight_decays=[0.25, 0.25]).copy(dtype)
    ours.exp_avgs = [torch.zeros_like(m) for m in ours.exp_avgs]
    ours.exp_avg_sqs = [torch.zeros_like(v) for v in ours.exp_avg_sqs]
    peers = []
    for wide in (dtype, torch.float64):
        params = [p.to(wide, copy=True).requires_grad_() for p in ours.params]
        settings = {"lr": ours.lr, "betas": ours.betas, "eps": ours.eps, "weight_decay": 0.25}
        peers.append((params, torch.optim.AdamW(params, **settings, foreach=False)))
    for _ in range(30):
        ours.grads = [torch.randn_like(g) for g in ours.grads]
        ours.run(twin)
        for params, optimizer in peers:
            for p, g in zip(params, ours.grads, strict=True):
                p.grad = g.to(p.dtype)
            optimizer.step()
    assert ours.step == 30
    for mine, theirs, exact in zip(ours.params, *(params for params, _ in peers), strict=True):
        assert_accurate(mine, theirs.detach(), exact.detach(), dtype)


def exact_norm(grads):
    return math.sqrt(sum(float(g.double().square().sum()) for g in grads))


def assert_norm(norm, grads):
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    exact = torch.tensor(exact_norm(grads), dtype=torch.float64)
    assert_accurate(norm.cpu(), exact.float(), exact, torch.float32)


SHAPES = {
    "one-number": [()],
    "one-matrix": [(13, 7)],
    "block-edges": [(1023,), (1024,), (1025,)],
    "with-an-empty-one": [(0,), (5, 0), (0, 5), (3,)],
    "many": [(3, 2)] * 500,
    "stacked": [(4, 5, 6), (7,)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_the_norm_is_over_all_gradients(twin, device, shapes, dtype):
    grads = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    assert_norm(twin.grad_norm(grads), grads)


def test_gradients_of_both_dtypes_go_together(twin, device):
    grads = [torch.full((3,), 2.0, device=device), torch.ones(4, device=device).bfloat16()]
    for order in (grads, grads[::-1]):
        norm = twin.grad_norm(order)
        assert (norm.item(), norm.dtype) == (4.0, torch.float32)


def test_the_norm_of_nothing_is_zero(twin):
    norm = twin.grad_norm([])
    assert (norm.item(), norm.dtype, norm.shape) == (0.0, torch.float32, ())


def test_gradients_may_lie_apart_in_memory(twin, device):
    grads = [torch.randn(6, 8, device=device)[:, ::2], torch.ones(1, 3, device=device).expand(5, 3)]
    assert_norm(twin.grad_norm(grads), grads)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_shows_in_the_norm(twin, device, value, dtype):
    grads = [torch.randn(20, 7, device=device).to(dtype) for _ in range(3)]
    grads[1][19, 6] = value
    norm = twin.grad_norm(grads)
    assert norm.isnan() if math.isnan(value) else norm == math.inf


@pytest.mark.parametrize("shape", [(4096, 4096), (1 << 24,), (1, 1 << 24)], ids=str)
@pytest.mark.parametrize("even", [True, False], ids=["all-0.1", "normal"])
@pytest.mark.slow
def test_the_norm_of_16_million_numbers_is_exact(twin, device, shape, even):
    grad = torch.full(shape, 0.1, device=device) if even else torch.randn(shape, device=device)
    assert_norm(twin.grad_norm([grad]), [grad])


def test_the_norm_of_a_wide_row_is_exact(twin, device):
    grads = [torch.full((1 << 20,), 0.1, device=device)]
    assert_norm(twin.grad_norm(grads), grads)
