"""rotary: pairs of channels turned by an angle that grows with the position."""

from functools import partial

import pytest
import torch
from numerics import assert_twins, wide
from torch.library import opcheck

from fastbrain import kernels
from fastbrain.kernels import fused, reference, rope

MAX = 32


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

    def make(B=2, S=5, H=4, G=2, K=6, T=MAX):
        tables = {n: randn(T, K // 2).detach() for n in ("cos", "sin")}
        return {"q": randn(B, S, H, K), "k": randn(B, S, G, K), **tables}

    return make


@pytest.fixture
def angles(device):
    """Tables of true angles for heads of 6."""
    turns = torch.arange(MAX, device=device)[:, None] * torch.tensor(
        [1.0, 0.3, 0.01], device=device
    )
    return {"cos": turns.cos(), "sin": turns.sin()}


# rows, heads of tokens, below, at and above a block of 32 and in several of them, a block that
# starts within a token and one that spans sequences; widths that are no power of two; the widest
SHAPES = [
    (2, 5, 4, 2, 6), (1, 1, 1, 1, 2), (1, 12, 3, 3, 8), (1, 1, 31, 1, 64), (1, 1, 32, 1, 64),
    (1, 1, 33, 1, 64), (3, 3, 13, 5, 64), (2, 1, 2, 1, 96), (1, 1, 2, 1, 256),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_turn_with_their_position(twin, inputs, shape, dtype):
    assert_twins(twin.rotary, by_pair, inputs(*shape), dtype, fp32=["cos", "sin"])


def test_the_offset_is_the_place_of_the_first_token(twin, inputs, dtype):
    op, definition = (partial(f, offset=7) for f in (twin.rotary, by_pair))
    assert_twins(op, definition, inputs(), dtype, fp32=["cos", "sin"])


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_positions_place_every_token(twin, inputs, tensor, kind, dtype):
    positions = tensor([[0, 1, 2, 0, 1], [11, 0, 5, 5, 3]], dtype=kind)
    op, definition = (partial(f, positions=positions) for f in (twin.rotary, by_pair))
    assert_twins(op, definition, inputs(), dtype, fp32=["cos", "sin"])


def test_gradients_are_the_slopes(inputs):
    q, k, cos, sin = (x.detach().double() for x in inputs(1, 2, 2, 1, 4).values())
    wanted = [q.requires_grad_(), k.requires_grad_()]
    assert torch.autograd.gradcheck(lambda q, k: reference.rotary(q, k, cos, sin, 3), wanted)


@pytest.mark.parametrize("offset", [1, 4, 7])
def test_an_offset_gives_that_slice_of_a_longer_call(twin, inputs, offset):
    given = inputs(S=12)
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


@pytest.mark.parametrize("given", [{"offset": 39_998}, {"positions": [[39_999, 32_768]]}], ids=str)
def test_positions_may_be_as_high_as_the_tables_reach(twin, inputs, tensor, given):
    # the tables have rows before them, which positions that wrapped around would read
    tables = {n: x[2**15 :] for n, x in inputs(T=2**15 + 40_000).items() if n in ("cos", "sin")}
    given = {n: x if n == "offset" else tensor(x) for n, x in given.items()}
    op, definition = (partial(f, **given) for f in (twin.rotary, by_pair))
    assert_twins(op, definition, inputs(1, 2) | tables, torch.float32)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((3, 2, 2, 8), (2**30, 16, 8)), ((1, 3, 2, 8), (64, 2**30, 8)), ((1, 1, 3, 8), (8, 8, 2**30))],
    ids=["sequences", "positions", "heads"],
)
def test_tokens_may_lie_past_2_to_the_31_elements(device, inputs, far, shape, strides):
    B, S, H, K = shape
    given = inputs(B, S, H, H, K)
    given |= {n: given[n].detach().bfloat16() for n in "qk"}
    found = [fused.rotary(**given | {n: far(given[n], *strides)}) for n in "qk"]
    for turned in found:
        assert all(map(torch.equal, turned, fused.rotary(**given)))


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


def test_the_last_offset_is_in_the_table_and_the_next_is_refused(twin, inputs):
    given = inputs()
    with kernels.use(twin):
        last, _ = kernels.rotary(**given, offset=MAX - 5)
        with pytest.raises(ValueError, match="offset"):
            kernels.rotary(**given, offset=MAX - 4)
    positions = torch.arange(MAX - 5, MAX, device=last.device).expand(2, 5)
    assert torch.equal(last, twin.rotary(**given, positions=positions)[0])


def test_equal_gradients_come_of_equal_calls(twin, inputs):
    given = inputs(2, 9, 3, 1, 16)
    seen = []
    for _ in range(5):
        outputs = twin.rotary(**given)
        incoming = [torch.ones_like(out) for out in outputs]
        seen.append(torch.autograd.grad(outputs, [given["q"], given["k"]], incoming))
    for again in seen:
        assert all(torch.equal(a, b) for a, b in zip(again, seen[0], strict=True))


@pytest.mark.parametrize("placed", [False, True])
def test_backward_keeps_the_tables_alone(inputs, tensor, placed):
    given = inputs()
    positions = tensor([[0, 1, 2, 0, 1]] * 2, dtype=torch.int32) if placed else None
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        fused.rotary(**given, positions=positions)
    wanted = [given["cos"], given["sin"], *([positions] if placed else [])]
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in wanted]


@pytest.mark.parametrize("placed", [False, True])
def test_the_operators_keep_the_rules_of_pytorch(inputs, tensor, placed):
    given = inputs()
    positions = tensor([[0, 1, 2, 0, 1]] * 2, dtype=torch.int32) if placed else None
    opcheck(rope._fwd, (*given.values(), positions, 3))
    opcheck(rope._bwd, (*(x.detach() for x in given.values()), positions, 3))


def test_compiling_changes_nothing(inputs):
    given = inputs()

    def step(op):
        outputs = op(**given, offset=2)
        total = sum(out.square().sum() for out in outputs)
        return [*outputs, *torch.autograd.grad(total, [given["q"], given["k"]])]

    with kernels.use(fused):
        compiled = torch.compile(kernels.rotary, fullgraph=True, backend="aot_eager")
        for ours, theirs in zip(step(compiled), step(kernels.rotary), strict=True):
            assert torch.equal(ours, theirs)
