"""What holds for every operation: its signature, its promises, and the choice of implementation."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from fastbrain import kernels
from fastbrain.kernels import AdamScalars, contracts, reference

ADAM = {"betas": (0.9, 0.99), "eps": 1e-8}
OPERATIONS = [name for name in reference.__all__ if name != "AdamScalars"]


def scalars(device="cpu"):
    rates = (torch.tensor(x, device=device) for x in (0.1, 1.0, 1.0))
    return AdamScalars(
        *rates,
        torch.tensor(0, device=device),
        torch.tensor(0, dtype=torch.int32, device=device),
    )


def calls(N, dtype, device):
    """Every differentiable operation on N rows, as (leaves, what is done with them)."""

    def leaf(*shape, dtype=dtype):
        return torch.randn(shape, device=device).to(dtype).requires_grad_()

    ids = torch.arange(2 * N, device=device).view(N, 2) % 3
    half = {
        "targets": torch.arange(N, device=device) % 5,
        "mask": torch.arange(N, device=device) % 2 == 0,
    }
    fp32 = torch.promote_types(dtype, torch.float32)
    offsets = torch.tensor([0, N // 2, N, N], dtype=torch.int32, device=device)
    tables = {n: torch.randn(9, 8, device=device, dtype=fp32) for n in ("cos", "sin")}
    # a sequence is many rows, and the interpreter takes a second for some
    B = min(N, 2)
    heads = {"q": leaf(B, 7, 4, 16), "k": leaf(B, 7, 2, 16)}
    expert = {"x": leaf(N, 6), "w_gate_up": leaf(3, 8, 6), "w_down": leaf(3, 6, 4)}
    stream = {"x": leaf(N, 6), "weight": leaf(6, dtype=fp32), "residual": leaf(N, 6)}
    return {
        "causal_attention": (heads | {"v": leaf(B, 7, 2, 16)}, {}),
        "expert_ffn": (expert | {"gates": leaf(N, 2, dtype=fp32)}, {"expert_ids": ids}),
        "grouped_matmul": ({"x": leaf(N, 6), "w": leaf(3, 4, 6)}, {"offsets": offsets}),
        "linear": ({"x": leaf(N, 6), "weight": leaf(4, 6)}, {}),
        "masked_cross_entropy": ({"logits": leaf(N, 5)}, half),
        "linear_cross_entropy": ({"hidden": leaf(N, 6), "weight": leaf(5, 6)}, half),
        "rms_norm": (stream, {"eps": 1e-6}),
        "rotary": (heads, tables),
        "swiglu": ({"gate_up": leaf(N, 6)}, {}),
    }  # fmt: skip


DIFFERENTIABLE = list(calls(0, torch.float32, "cpu"))


@pytest.fixture(params=DIFFERENTIABLE)
def name(request):
    return request.param


@pytest.fixture(autouse=True)
def _twin_in_use(twin):
    with kernels.use(twin):
        yield


def outputs_of(name, leaves, given):
    """The floating-point outputs that follow from the leaves."""
    outputs = getattr(kernels, name)(**leaves, **given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [out for out in outputs if out.is_floating_point()]


def bits(*tensors):
    return [x.detach().contiguous().flatten().view(torch.uint8).tolist() for x in tensors]


def test_no_rows_give_no_rows_and_no_gradient(name, device, dtype):
    leaves, given = calls(0, dtype, device)[name]
    outputs = outputs_of(name, leaves, given)
    for out in outputs:
        assert out.shape[:1] in ((), (0,))
        assert out.sum() == 0
    sum(out.sum() for out in outputs).backward()
    for leaf in leaves.values():
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_equal_calls_give_equal_bits(name, device, dtype):
    leaves, given = calls(8, dtype, device)[name]
    seen = []
    for _ in range(40 if device.type == "cuda" else 2):
        outputs = outputs_of(name, leaves, given)
        incoming = [torch.ones_like(out) for out in outputs]
        seen.append(bits(*outputs, *torch.autograd.grad(outputs, leaves.values(), incoming)))
    assert all(again == seen[0] for again in seen)


def test_an_incoming_gradient_may_have_stride_zero(name, device, dtype):
    leaves, given = calls(6, dtype, device)[name]
    found = []
    for expanded in (True, False):
        outputs = outputs_of(name, leaves, given)
        incoming = [out.new_tensor(0.5).expand(out.shape) for out in outputs]
        incoming = incoming if expanded else [g.contiguous() for g in incoming]
        found.append(bits(*torch.autograd.grad(outputs, leaves.values(), incoming)))
    assert found[0] == found[1]


def test_dtypes_are_those_of_the_inputs(name, device, dtype):
    leaves, given = calls(6, dtype, device)[name]
    outputs = outputs_of(name, leaves, given)
    wanted = torch.promote_types(dtype, torch.float32) if "cross_entropy" in name else dtype
    assert [out.dtype for out in outputs] == [wanted] * len(outputs)
    sum(out.sum() for out in outputs).backward()
    assert all(leaf.grad.dtype == leaf.dtype for leaf in leaves.values())


def test_inputs_are_only_read(name, device, dtype):
    leaves, given = calls(6, dtype, device)[name]
    tensors = [x for x in (leaves | given).values() if isinstance(x, torch.Tensor)]
    before = bits(*tensors)
    sum(out.square().sum() for out in outputs_of(name, leaves, given)).backward()
    assert bits(*tensors) == before


# arguments beside the rows and weights, whose own tests lay them apart
BESIDE = {
    "causal_attention": ["segments"],
    "expert_ffn": ["expert_ids", "gates"],
    "grouped_matmul": ["offsets"],
    "masked_cross_entropy": ["targets", "mask"],
    "linear_cross_entropy": ["targets", "mask"],
    "rms_norm": ["weight"],
    "rotary": ["cos", "sin", "positions"],
}


@pytest.mark.parametrize(
    ("name", "beside"), [(n, b) for n, names in BESIDE.items() for b in names], indirect=["name"]
)
def test_what_goes_beside_the_rows_may_lie_apart(name, beside, device):
    leaves, given = calls(4, torch.float32, device)[name]
    documents = torch.tensor([[0, 0, 1, 1, 1, 2, 2]] * 2, dtype=torch.int32, device=device)
    if beside in ("segments", "positions"):
        given = given | {beside: documents}
    if name == "linear_cross_entropy":
        given = given | {"max_rows": 4}  # the kernel that packs rows reads the mask
    found = []
    for apart in (True, False):
        args = {n: x.detach() for n, x in (leaves | given).items() if isinstance(x, torch.Tensor)}
        if apart:
            x = args[beside]
            # with the opposite, or other valid numbers, in between
            other = ~x if x.dtype == torch.bool else x.flatten().roll(1).view(x.shape)
            args[beside] = torch.stack([x, other], x.dim())[..., 0]
            assert not args[beside].is_contiguous()
        wanted = [args[n].requires_grad_() for n in leaves]
        outputs = outputs_of(name, args, {n: x for n, x in given.items() if n not in args})
        incoming = [torch.ones_like(out) for out in outputs]
        found.append(bits(*outputs, *torch.autograd.grad(outputs, wanted, incoming)))
    assert found[0] == found[1]


@pytest.mark.parametrize("frozen", [True, False])
def test_no_gradient_is_tracked_where_none_is_wanted(name, device, frozen):
    leaves, given = calls(6, torch.float32, device)[name]
    leaves = {n: x.detach() for n, x in leaves.items()} if frozen else leaves
    with torch.set_grad_enabled(frozen):
        assert not any(out.requires_grad for out in outputs_of(name, leaves, given))


@pytest.mark.parametrize(
    "name",
    [n for n in DIFFERENTIABLE if n not in ("linear", "masked_cross_entropy")],
    indirect=True,
)
@pytest.mark.parametrize("square", [True, False], ids=["of-squares", "of-a-sum"])
def test_a_second_derivative_is_refused(name, device, square):
    if name == "rotary" and not square:
        pytest.skip("rotary is linear: the gradient of a sum is a constant")
    leaves, given = calls(6, torch.float32, device)[name]
    outputs = outputs_of(name, leaves, given)
    # the gradient of a plain sum has no graph by which autograd would notice
    total = sum((out.square() if square else out).sum() for out in outputs)

    def differentiate_twice():
        first = torch.autograd.grad(total, list(leaves.values()), create_graph=True)
        sum(g.square().sum() for g in first).backward()

    refusal = r"differentiated once|not implemented|no autograd formula"
    with pytest.raises(RuntimeError, match=refusal):
        differentiate_twice()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_implementations_have_the_signature_of_the_facade(twin, operation):
    facade = inspect.signature(getattr(kernels, operation))
    assert inspect.signature(getattr(twin, operation)) == facade


def test_every_operation_is_public():
    assert set(OPERATIONS) < set(kernels.__all__)
    assert all(hasattr(kernels, name) for name in kernels.__all__)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_argument_reaches_the_chosen_implementation(operation, monkeypatch):
    signature = inspect.signature(getattr(reference, operation))
    seen = []

    def recorder(*args, **kwargs):
        seen.append(signature.bind(*args, **kwargs).arguments)
        return "result"

    monkeypatch.setattr(contracts, operation, lambda *args: None)
    marks = {name: object() for name in signature.parameters}
    # the two that choose by a tensor inside of an argument
    marks |= {"scalars": scalars()} if operation == "adam_step" else {}
    marks |= {"grads": []} if operation == "grad_norm" else {}
    with kernels.use(SimpleNamespace(**{operation: recorder})):
        result = getattr(kernels, operation)(**marks)
    assert seen == [marks]
    assert result == (None if operation == "adam_step" else "result")


def test_the_choice_ends_with_its_block_even_by_an_error():
    loud = SimpleNamespace(swiglu=lambda gate_up: "loud")
    quiet = SimpleNamespace(swiglu=lambda gate_up: "quiet")
    x = torch.ones(2, 4)
    with kernels.use(loud):
        with kernels.use(quiet):
            assert kernels.swiglu(x) == "quiet"
        assert kernels.swiglu(x) == "loud"
        with pytest.raises(KeyError), kernels.use(quiet):
            raise KeyError
        assert kernels.swiglu(x) == "loud"
    assert torch.equal(kernels.swiglu(x), reference.swiglu(x))


@pytest.mark.parametrize(
    "operation", [n for n in OPERATIONS if n not in ("adam_step", "grad_norm")]
)
def test_arguments_are_checked_without_reading_them(operation):
    # a meta tensor has a shape and a dtype, and no numbers that could be waited for
    leaves, given = calls(6, torch.bfloat16, "meta")[operation]
    given = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    with kernels.use(SimpleNamespace(**{operation: lambda *args, **kwargs: "reached"})):
        assert getattr(kernels, operation)(**leaves, **given) == "reached"


def test_lists_of_tensors_are_checked_without_reading_them():
    p = [torch.ones(3, device="meta")]
    idle = SimpleNamespace(adam_step=lambda *a, **k: None, grad_norm=lambda grads: "reached")
    with kernels.use(idle):
        assert kernels.grad_norm(p) == "reached"
        kernels.adam_step(p, p, p, p, [p[0].bfloat16()], scalars("meta"), **ADAM, weight_decays=[0])
