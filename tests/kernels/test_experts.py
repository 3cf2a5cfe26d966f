"""What only the expert kernels promise: what they keep, skip, read in place, and register."""

import pytest
import torch
from numerics import assert_accurate
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fastbrain import kernels
from fastbrain.kernels import experts, fused, grouped_gemm
from fastbrain.kernels.launch import launch, recorded

N, K, E, D, F = 12, 2, 4, 24, 16
NAMES = ("x", "w_gate_up", "w_down", "gates")


def shapes(n=N):
    return {"x": (n, D), "w_gate_up": (E, 2 * F, D), "w_down": (E, D, F), "gates": (n, K)}


def leaves(device, wanted=NAMES):
    return {
        name: torch.randn(shape, device=device).requires_grad_(name in wanted)
        for name, shape in shapes().items()
    }


@pytest.fixture
def ids(device):
    return torch.randint(-1, E, (N, K), device=device)


def storages(tensors):
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fused-fp32", "fused-bf16"])
def test_what_is_kept_beside_the_inputs_has_a_closed_form(device, ids, dtype):
    inputs = {n: x.detach() for n, x in leaves(device).items()}
    inputs = {n: (x if n == "gates" else x.to(dtype)).requires_grad_() for n, x in inputs.items()}
    kept = []
    with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        y = fused.expert_ffn(**inputs, expert_ids=ids)
    given = storages([*inputs.values(), ids])
    num_tiles = -(-N * K // 64) + E
    tables = N * K + N * K + (E + 1) + 3 * num_tiles + E
    expected = N * K * 2 * F * dtype.itemsize + 4 * tables
    assert sum(size for at, size in storages(kept).items() if at not in given) == expected
    assert storages([y]).keys().isdisjoint(storages(kept))


def launched(wanted, grad_mode=True):
    """Kernels by name, with their flags, of a forward and a backward pass."""
    meta = {
        name: torch.empty(shape, device="meta", requires_grad=name in wanted)
        for name, shape in shapes().items()
    }
    choices = torch.empty(N, K, dtype=torch.int64, device="meta")
    with recorded("sm_86") as forward, torch.set_grad_enabled(grad_mode):
        y = fused.expert_ffn(**meta, expert_ids=choices)
    with recorded("sm_86") as backward:
        if y.requires_grad:
            y.backward(torch.empty_like(y))
    return [
        [(start.kernel.__name__.strip("_"), start.options) for start in starts]
        for starts in (forward, backward)
    ]


ROUTING = ["count_kernel", "scan_kernel", "place_kernel", "map_kernel"]
HIDDEN, PARTS = "hidden_grad_kernel", "gates_grad_kernel"
WEIGHTS, ROWS, TOKENS = "weights_kernel", "rows_kernel", "tokens_kernel"
BACKWARD = {
    "all": (NAMES, [HIDDEN, PARTS, WEIGHTS, WEIGHTS, ROWS, TOKENS]),
    "x": (["x"], [HIDDEN, ROWS, TOKENS]),
    "w_gate_up": (["w_gate_up"], [HIDDEN, WEIGHTS]),
    "w_down": (["w_down"], [HIDDEN, WEIGHTS]),
    "gates": (["gates"], [HIDDEN, PARTS]),
}


@pytest.mark.parametrize("wanted", BACKWARD, ids=lambda name: f"fused-{name}")
def test_backward_does_only_what_is_wanted(wanted):
    names, expected = BACKWARD[wanted]
    forward, backward = launched(names)
    assert [name for name, _ in forward] == [*ROUTING, "hidden_kernel", ROWS, TOKENS]
    assert [name for name, _ in backward] == expected
    flags = backward[0][1]
    assert flags["PRODUCT"] == (wanted != "w_down")
    assert flags["GATE_UP"] == (wanted in ("all", "x", "w_gate_up"))
    assert flags["SCALED"] == (wanted in ("all", "w_down"))
    assert flags["GATES"] == (wanted in ("all", "gates"))


def test_fused_forward_keeps_nothing_where_no_gradient_is_wanted(device, ids, recorder):
    for names, grad_mode in (((), True), (NAMES, False)):
        forward, backward = launched(names, grad_mode)
        assert not backward
        assert not dict(forward)["hidden_kernel"]["SAVE"]
    with torch.no_grad(), recorder:
        fused.expert_ffn(**leaves(device), expert_ids=ids)
    assert (0, 2 * F) in recorder.shapes
    assert (N * K, 2 * F) not in recorder.shapes


@pytest.mark.parametrize("wanted", NAMES, ids=lambda name: f"fused-{name}")
def test_a_gradient_does_not_depend_on_which_others_are_wanted(device, ids, wanted):
    inputs = leaves(device)
    alone = {n: x.detach().requires_grad_(n == wanted) for n, x in inputs.items()}
    for given in (inputs, alone):
        fused.expert_ffn(**given, expert_ids=ids).square().sum().backward()
    assert torch.equal(alone[wanted].grad, inputs[wanted].grad)


def test_fused_backward_uses_the_routing_of_forward(device, ids):
    inputs, found = leaves(device), []
    for change in (False, True):
        y = fused.expert_ffn(**inputs, expert_ids=ids)
        if change:
            ids.fill_(-1)
        found.append(torch.autograd.grad(y.square().sum(), list(inputs.values())))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.slow
def test_fused_gradients_are_the_same_under_activation_checkpointing(device, ids):
    inputs, found = leaves(device), []

    def op(x):
        return fused.expert_ffn(**(inputs | {"x": x}), expert_ids=ids)

    for y in (op(inputs["x"]), checkpoint(op, inputs["x"], use_reentrant=False)):
        found.append([y, *torch.autograd.grad(y.square().sum(), list(inputs.values()))])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_fused_rows_may_lie_apart(device, ids):
    inputs = leaves(device)
    buffer = torch.full((N, D + 5), float("nan"), device=device)
    buffer[:, 2 : D + 2] = inputs["x"].detach()
    apart = inputs | {"x": buffer[:, 2 : D + 2].requires_grad_()}
    found = []
    for given in (inputs, apart):
        y = fused.expert_ffn(**given, expert_ids=ids)
        found.append([y, *torch.autograd.grad(y.square().sum(), list(given.values()))])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_fused_offsets_may_pass_2_to_the_31(device, far):
    x, w = (torch.randn(shape, device=device).bfloat16() for shape in ((3, 8), (3, 5, 8)))
    offsets = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=device)
    found = []
    for given in ((x, w), (far(x, 2**30), w), (x, far(w, 2**30, 8))):
        given = [a.detach().requires_grad_() for a in given]
        y = fused.grouped_matmul(*given, offsets)
        found.append([y, *torch.autograd.grad(y.square().sum(), given)])
    for other in found[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(other, found[0], strict=True))


def test_fused_tokens_may_lie_past_2_to_the_31(device, far):
    inputs = {n: x.detach().bfloat16() for n, x in leaves(device).items()}
    inputs |= {"x": inputs["x"][:3], "gates": inputs["gates"][:3].float()}
    inputs["w_gate_up"].requires_grad_()
    ids = torch.tensor([[-1, -1], [-1, 0], [1, 2]], device=device)
    found = []
    for x in (inputs["x"], far(inputs["x"], 2**30)):
        y = fused.expert_ffn(**(inputs | {"x": x}), expert_ids=ids)
        found.append([y, *torch.autograd.grad(y.square().sum(), inputs["w_gate_up"])])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_fused_gradients_of_tokens_may_lie_past_2_to_the_31(device, far):
    # two rows of one expert, of the first token and of one far away
    D, F, last = 512, 32, 2**22
    w, gate_up = (torch.randn(s, device=device).bfloat16() for s in ((1, D, F), (2, 2 * F)))
    dy, gates = torch.randn(2, D, device=device).bfloat16(), torch.randn(2, device=device)
    tiles = torch.tensor([[0], [0], [2]], dtype=torch.int32, device=device)
    apart = torch.zeros(last + 1, device=device)
    apart[::last] = gates
    found = []
    for token, rows, weights in ((1, dy, gates), (last, far(dy, last * D), apart)):
        slots = torch.tensor([0, token], dtype=torch.int32, device=device)
        dgate_up, scaled = torch.empty_like(gate_up), gate_up.new_empty(2, F)
        parts = gates.new_empty(1, 2)
        flags = {"CHOICES": 1, "PRODUCT": True, "GATE_UP": True, "SCALED": True, "GATES": True}
        launch(
            experts._hidden_grad_kernel, (1,), rows, w, gate_up, weights, dgate_up, scaled, parts,
            slots, tiles, 1, 2, 1, D, F, **flags, EVEN=True, BLOCK_M=16, BLOCK_F=F, BLOCK_D=64,
        )  # fmt: skip
        found.append([dgate_up, scaled, parts])
    assert found[0][2].all()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_fused_gradients_of_weights_may_lie_past_2_to_the_31(device, far):
    # the third of three weights, of which one block is worked out
    C = D = 2**15
    dy, x = (torch.randn(4, 32, device=device).bfloat16() for _ in range(2))
    wide = [torch.zeros(4, C, device=device).bfloat16() for _ in range(2)]
    wide[0][:, :32], wide[1][:, :32] = dy, x
    offsets = torch.tensor([0, 0, 0, 4], dtype=torch.int32, device=device)
    order = torch.tensor([2, 1, 0], dtype=torch.int32, device=device)
    dw = far(dy.new_zeros(3, 32, 32), C * D, D)
    launch(
        grouped_gemm._weights_kernel, (1,), *wide, dw, None, offsets, order, 4, C, D, D, CHOICES=1,
        GATHER_DY=False, GATHER_X=False, EVEN=True, BLOCK_C=32, BLOCK_D=32, BLOCK_M=16,
    )  # fmt: skip
    theirs, exact = ((dy.to(kind).T @ x.to(kind)) for kind in (torch.bfloat16, torch.float64))
    assert_accurate(dw[2], theirs, exact, torch.bfloat16)
    assert not dw[:2].any()


def test_fused_rows_of_a_token_are_added_in_fp32(device):
    # large terms that cancel: of a sum rounded to BF16 on its way little would be left
    gates = torch.tensor([[64.0, 48, 36, 1, -64, -48, -36, 0.5]], device=device)
    y = torch.randn(4, D, device=device).bfloat16().repeat(2, 1)
    rows = torch.arange(8, dtype=torch.int32, device=device)[None]
    theirs = (gates @ y.float()).bfloat16()
    exact = gates.double() @ y.double()
    assert_accurate(experts.sum_by_token(y, rows, gates), theirs, exact, torch.bfloat16)


def calls(device, ids):
    """Arguments of every registered operation."""
    x, w_gate_up, w_down, gates = leaves(device).values()
    offsets = torch.tensor([0, 3, 3, 7, 10], dtype=torch.int32, device=device)
    weights = w_gate_up, w_down
    shadows = tuple(w.detach().clone() for w in weights)
    _, *kept = grouped_gemm._ffn_fwd(x, *weights, None, None, ids, gates, True)
    _, *tables = grouped_gemm._matmul_fwd(x, w_gate_up, offsets, None)
    dtypes = [torch.float32, torch.float32]
    detached = [a.detach() for a in (x, *weights, gates, *kept)]
    dy = torch.randn(N, 2 * F, device=device)
    operands = x.detach(), w_gate_up.detach(), offsets, *tables
    return {
        "ffn-fwd": (grouped_gemm._ffn_fwd, (x, *weights, *shadows, ids, gates, True)),
        "ffn-bwd": (grouped_gemm._ffn_bwd, (x.detach(), *detached, *dtypes, [True] * 4)),
        "matmul-fwd": (grouped_gemm._matmul_fwd, (x, w_gate_up, offsets, None)),
        "matmul-bwd": (grouped_gemm._matmul_bwd, (dy, *operands, torch.float32, True, True)),
    }


@pytest.mark.parametrize(
    "name", ["ffn-fwd", "ffn-bwd", "matmul-fwd", "matmul-bwd"], ids=lambda n: f"fused-{n}"
)
def test_operations_are_registered_as_they_are(device, ids, name):
    # every row has a slot, because one that has none is not written
    op, args = calls(device, ids.clamp(min=0))[name]
    torch.library.opcheck(op, args)


@pytest.mark.parametrize("name", ["fused-expert_ffn", "fused-grouped_matmul"])
def test_facade_compiles_to_one_graph(device, ids, name):
    inputs = leaves(device)
    if name == "fused-expert_ffn":
        given = list(inputs.values())

        def op(x, w_gate_up, w_down, gates):
            return kernels.expert_ffn(x, w_gate_up, w_down, ids, gates)

    else:
        given = [inputs["x"], inputs["w_gate_up"]]
        offsets = torch.tensor([0, 3, 3, 7, 10], dtype=torch.int32, device=device)

        def op(x, w):
            return kernels.grouped_matmul(x, w, offsets)

    found = []
    with kernels.use(fused):
        for call in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
            y = call(*given)
            found.append([y, *torch.autograd.grad(y.square().sum(), given)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
