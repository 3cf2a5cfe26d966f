"""rotary: pairs of channels turned by an angle that grows with the position."""

from functools import partial

import pytest
import torch
from numerics import assert_twins, wide

from fastbrain.kernels import reference

MAX = 12


def by_pair(q, k, cos, sin, offset=0, positions=None):
    """One pair of channels of one token at a time."""

    def turned(x):
        B, S, _, K = x.shape
        out = torch.zeros_like(wide(x))
        for b in range(B):
            for s in range(S):
                place = offset + s if positions is None else int(positions[b, s])
                for j in range(K // 2):
                    low, high = wide(x)[b, s, :, j], wide(x)[b, s, :, j + K // 2]
                    out[b, s, :, j] = low * cos[place, j] - high * sin[place, j]
                    out[b, s, :, j + K // 2] = high * cos[place, j] + low * sin[place, j]
        return out.to(x.dtype)

    return turned(q), turned(k)


@pytest.fixture
def inputs(randn):
    """q and k of (B, S, H or G, K), and tables that are no circle, so that any mix-up shows."""

    def make(B=2, S=5, H=4, G=2, K=6):
        tables = {n: randn(MAX, K // 2).detach() for n in ("cos", "sin")}
        return {"q": randn(B, S, H, K), "k": randn(B, S, G, K), **tables}

    return make


@pytest.fixture
def angles(device):
    """Tables of true angles for heads of 6."""
    turns = torch.arange(MAX, device=device)[:, None] * torch.tensor(
        [1.0, 0.3, 0.01], device=device
    )
    return {"cos": turns.cos(), "sin": turns.sin()}


@pytest.mark.parametrize("shape", [(2, 5, 4, 2, 6), (1, 1, 1, 1, 2), (1, 12, 3, 3, 8)], ids=str)
def test_pairs_turn_with_their_position(inputs, shape, dtype):
    assert_twins(reference.rotary, by_pair, inputs(*shape), dtype, fp32=["cos", "sin"])


def test_the_offset_is_the_place_of_the_first_token(inputs, dtype):
    op, definition = (partial(f, offset=7) for f in (reference.rotary, by_pair))
    assert_twins(op, definition, inputs(), dtype, fp32=["cos", "sin"])


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_positions_place_every_token(inputs, tensor, kind, dtype):
    positions = tensor([[0, 1, 2, 0, 1], [11, 0, 5, 5, 3]], dtype=kind)
    op, definition = (partial(f, positions=positions) for f in (reference.rotary, by_pair))
    assert_twins(op, definition, inputs(), dtype, fp32=["cos", "sin"])


def test_gradients_are_the_slopes(inputs):
    q, k, cos, sin = (x.detach().double() for x in inputs(1, 2, 2, 1, 4).values())
    wanted = [q.requires_grad_(), k.requires_grad_()]
    assert torch.autograd.gradcheck(lambda q, k: reference.rotary(q, k, cos, sin, 3), wanted)


@pytest.mark.parametrize("offset", [1, 4, 7])
def test_an_offset_gives_that_slice_of_a_longer_call(twin, inputs, offset):
    given = inputs(S=MAX)
    whole = twin.rotary(**given)
    for name in "qk":
        given[name] = given[name][:, offset : offset + 5]
    for part, full in zip(twin.rotary(**given, offset=offset), whole, strict=True):
        assert torch.equal(part, full[:, offset : offset + 5])


def test_packed_documents_each_start_at_position_zero(twin, inputs, tensor):
    given = inputs()
    packed = twin.rotary(**given, positions=tensor([[0, 1, 2, 0, 1]] * 2, dtype=torch.int32))
    for part in (slice(0, 3), slice(3, 5)):
        alone = twin.rotary(given["q"][:, part], given["k"][:, part], given["cos"], given["sin"])
        for ours, theirs in zip(packed, alone, strict=True):
            assert torch.equal(ours[:, part], theirs)


def test_positions_replace_the_offset(twin, inputs, device):
    given = inputs()
    positions = torch.arange(5, device=device).expand(2, 5)
    for ours, theirs in zip(
        twin.rotary(**given, offset=99, positions=positions), twin.rotary(**given), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_turning_back_gives_the_input(twin, inputs, angles):
    given = {n: x for n, x in inputs().items() if n in "qk"}

    def there_and_back(q, k):
        turned = twin.rotary(q, k, **angles, offset=2)
        return twin.rotary(*turned, angles["cos"], -angles["sin"], offset=2)

    assert_twins(there_and_back, lambda q, k: (q * 1, k * 1), given, torch.float32)


def test_backward_turns_back(twin, inputs, angles):
    given = {n: x for n, x in inputs().items() if n in "qk"}
    turned = twin.rotary(**given, **angles, offset=2)
    torch.autograd.backward(turned, [t.detach() for t in turned])

    def gradients(q, k):
        return given["q"].grad, given["k"].grad

    plain = {n: x.detach() for n, x in given.items()}
    assert_twins(gradients, lambda q, k: (q, k), plain, torch.float32)


def test_bf16_is_rounded_only_once(twin, inputs, angles):
    q, k = (x.detach().bfloat16() for n, x in inputs().items() if n in "qk")
    narrow = twin.rotary(q, k, **angles)
    for ours, exact in zip(narrow, twin.rotary(q.float(), k.float(), **angles), strict=True):
        assert torch.equal(ours, exact.bfloat16())


def test_position_zero_is_left_as_it_was(twin, inputs, angles):
    given = {n: x for n, x in inputs(S=1).items() if n in "qk"}
    for turned, x in zip(twin.rotary(**given, **angles), given.values(), strict=True):
        assert torch.equal(turned, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_contiguous_whatever_the_inputs(twin, inputs, dtype):
    given = inputs()
    given |= {
        n: given[n].detach().to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for n in "qk"
    }
    assert not given["q"].is_contiguous()
    for turned, x in zip(twin.rotary(**given), (given["q"], given["k"]), strict=True):
        assert turned.is_contiguous()
        assert (turned.dtype, turned.shape) == (x.dtype, x.shape)


def test_views_of_one_projection_equal_copies(twin, inputs, device):
    given = inputs()
    fused = torch.full((2, 5, 8, 6), float("nan"), device=device)
    fused[:, :, 1:7] = torch.randn(2, 5, 6, 6, device=device)
    fused.requires_grad_()
    views = fused[:, :, 1:5], fused[:, :, 5:7]
    copies = [v.detach().clone().requires_grad_() for v in views]
    ours = twin.rotary(*views, given["cos"], given["sin"])
    theirs = twin.rotary(*copies, given["cos"], given["sin"])
    incoming = [torch.randn_like(o) for o in ours]
    for outs in (ours, theirs):
        torch.autograd.backward(outs, incoming)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(fused.grad[:, :, 1:7], torch.cat([c.grad for c in copies], dim=2))
