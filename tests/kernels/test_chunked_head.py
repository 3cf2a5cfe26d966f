"""linear_cross_entropy: the loss of a product whose rows of logits never exist all at once."""

from functools import partial

import pytest
import torch
from numerics import assert_accurate, assert_twins, wide

from fastbrain.kernels import chunked_head, fused, matmul
from fastbrain.kernels.launch import launch


def by_product(hidden, weight, targets, mask):
    """The loss of logits that are all there at once."""
    likelihoods = (wide(hidden) @ wide(weight).T)[mask].log_softmax(1)
    return -likelihoods.gather(1, targets[mask, None]).sum(), mask.sum()


only_fused = pytest.mark.parametrize("twin", [fused], ids=["fused"])


@pytest.fixture
def head(randn, device):
    """Inputs of linear_cross_entropy, of which about half the rows count."""

    def make(N=21, D=6, V=50):
        weight = (randn(V, D).detach() / D**0.5).requires_grad_()
        targets = torch.randint(V, (N,), device=device)
        mask = torch.rand(N, device=device) < 0.5
        return {"hidden": randn(N, D), "weight": weight, "targets": targets, "mask": mask}

    return make


@pytest.mark.parametrize("max_rows", [None, 21])
@pytest.mark.parametrize("chunk", [1, 20, 21, 22, 2048])
def test_the_linear_loss_is_that_of_the_product(twin, head, chunk, max_rows, dtype):
    op = partial(twin.linear_cross_entropy, chunk=chunk, max_rows=max_rows)
    assert_twins(op, by_product, head(), dtype)


# one row; a vocabulary of a block, of one word less and one vector more; the widest hidden rows
SHAPES = {"one-row": (1, 6, 50), "one-word": (3, 6, 1), "below-a-block": (2, 6, 2047)}
SHAPES |= {"a-block": (2, 6, 2048), "a-vector-above": (2, 6, 2056), "wide": (5, 1030, 9)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_any_shape_will_do(twin, head, shape, dtype):
    inputs = head(*shape)
    inputs["mask"][0] = True
    inputs["targets"][0] = shape[2] - 1
    # of one word the loss is 0, whatever the logits
    scale = {"out0": shape[0], "dhidden": 1.0, "dweight": 1.0}
    op = partial(twin.linear_cross_entropy, max_rows=shape[0])
    assert_twins(op, by_product, inputs, dtype, scale=scale)


# the kernel numbers 4096 rows at a time
@pytest.mark.parametrize("N", [1, 4095, 4096, 4097, 9000])
@pytest.mark.parametrize("short", [0, 1])
@only_fused
def test_rows_that_count_are_packed_in_order(twin, device, N, short):
    mask = torch.rand(N, device=device) < 0.5
    mask[-1] = True
    rows = mask.nonzero().squeeze(1)
    M = min(N, len(rows) + 3) if not short else len(rows) - short
    source, place = chunked_head._pack(mask, M)
    expected = torch.full((M,), -1, device=device)
    expected[: len(rows)] = rows[:M]
    assert torch.equal(source.long(), expected)
    expected = torch.full((N,), -1, device=device)
    expected[rows[:M]] = torch.arange(min(M, len(rows)), device=device)
    assert torch.equal(place.long(), expected)


def test_rows_are_gathered_past_2_to_the_31_elements(device, far, hollow):
    near = torch.randn(3, 40, device=device).bfloat16()
    table = torch.tensor([2, -1, 1], dtype=torch.int32, device=device)
    expected = near[table] * (table >= 0)[:, None]
    assert torch.equal(chunked_head._gather(far(near, 2**30), table), expected)
    # rows so wide that the third begins there, of which one block of columns is written
    x, out = far(near, 2**30), far(torch.zeros_like(near), 2**30)
    launch(chunked_head._gather_kernel, (3, 1), x, table, out, 2**30, 2**30, BLOCK=32)
    assert torch.equal(out[:, :32], expected[:, :32])


@pytest.mark.slow
def test_losses_are_of_logits_past_2_to_the_31_elements(device, far):
    # all rows but one are left out, so that few of the logits are read
    width, last = 2**24, 2**7
    logits = torch.randn(3, 24, device=device).bfloat16()
    source = torch.full((last + 1,), -1, dtype=torch.int32, device=device)
    source[last] = 0
    targets, losses = source.new_tensor([5]).long(), source.new_zeros(last + 1).float()
    tensors = far(logits, width * last), targets, source, losses
    # an interpreter takes its time by the call, a card's compiler by the block
    block = 2**16 if device.type == "cpu" else 2**11
    options = {"GRADIENT": False, "VECTOR": 8, "BLOCK": block}
    launch(chunked_head._row_kernel, (last + 1,), *tensors, 24, width // 8, **options)
    assert not losses[:last].any()
    theirs, exact = (
        -logits[1].to(kind).log_softmax(0)[5] for kind in (torch.float32, torch.float64)
    )
    assert_accurate(losses[last], theirs, exact, torch.float32)


@pytest.mark.parametrize("max_rows", [None, 0, 7])
def test_no_rows_at_all_give_zero(twin, head, max_rows):
    inputs = head(N=0)
    total, count = twin.linear_cross_entropy(**inputs, max_rows=max_rows)
    total.backward()
    assert total == count == 0
    assert inputs["hidden"].grad.shape == (0, 6)
    assert torch.equal(inputs["weight"].grad, torch.zeros(50, 6, device=total.device))


@pytest.mark.parametrize("max_rows", [None, 21])
def test_a_shadow_is_multiplied_and_its_master_gets_the_gradient(twin, head, max_rows):
    inputs = head()
    shadow = (3 * inputs["weight"].detach()).bfloat16()

    def definition(hidden, weight, targets, mask):
        used = weight + (shadow.to(weight.dtype) - weight).detach()
        return by_product(hidden, used, targets, mask)

    op = partial(twin.linear_cross_entropy, shadow=shadow, chunk=5, max_rows=max_rows)
    assert_twins(op, definition, inputs, torch.bfloat16, fp32=["weight"])


def test_the_gradient_of_a_weight_adds_up_in_fp32(twin, head):
    # rounded to BF16 after every chunk of one row, small gradients would vanish in the sum
    inputs = head(N=100, V=4)
    inputs["hidden"] = torch.ones_like(inputs["hidden"]).bfloat16()
    inputs["weight"] = (0 * inputs["weight"].detach()).bfloat16().requires_grad_()
    inputs["targets"].zero_()
    inputs["mask"][:] = True
    twin.linear_cross_entropy(**inputs, chunk=1)[0].backward()
    expected = torch.tensor([-75.0, 25, 25, 25], device=inputs["mask"].device)
    assert torch.equal(inputs["weight"].grad[:, 0].float(), expected)


@pytest.mark.parametrize("spare", [0, 1, 100])
def test_compacted_rows_give_the_same_loss(twin, head, spare):
    inputs = head()
    max_rows = int(inputs["mask"].sum()) + spare
    compacted = partial(twin.linear_cross_entropy, chunk=4, max_rows=max_rows)
    assert_twins(compacted, twin.linear_cross_entropy, inputs, torch.float32)


@pytest.mark.usefixtures("in_the_open")
def test_a_quarter_of_the_rows_costs_a_quarter_of_the_chunks(twin, head, recorder):
    inputs = head(N=64)
    inputs["mask"][:] = torch.arange(64, device=inputs["mask"].device) % 4 == 1
    with torch.no_grad(), recorder as seen:
        twin.linear_cross_entropy(**inputs, chunk=8, max_rows=16)
    assert len(products(seen)) == 2


def test_more_rows_than_max_rows_make_the_sum_and_the_gradients_nan(twin, head):
    inputs = head()
    count = int(inputs["mask"].sum())
    total, counted = twin.linear_cross_entropy(**inputs, max_rows=count - 1)
    total.backward()
    assert total.isnan()
    assert counted == count
    assert inputs["weight"].grad.isnan().any()
    assert inputs["hidden"].grad.isnan().any()


def test_max_rows_may_be_zero(twin, head):
    inputs = head()
    inputs["mask"][:] = False
    total, count = twin.linear_cross_entropy(**inputs, max_rows=0)
    total.backward()
    assert total == count == 0
    assert inputs["weight"].grad.count_nonzero() == inputs["hidden"].grad.count_nonzero() == 0
    inputs["mask"][3] = True
    assert twin.linear_cross_entropy(**inputs, max_rows=0)[0].isnan()


def test_columns_of_hidden_may_lie_apart(twin, head):
    inputs = head()
    apart = torch.full((21, 20), float("nan"), device=inputs["mask"].device)
    found = []
    for spread in (apart[:, 2:8], apart[:, 1:13:2], torch.empty_like(inputs["hidden"])):
        spread.copy_(inputs["hidden"].detach())
        leaf = spread.detach().requires_grad_()
        total, _ = twin.linear_cross_entropy(**inputs | {"hidden": leaf}, max_rows=21)
        found.append([total, *torch.autograd.grad(total, (leaf, inputs["weight"]))])
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


def test_backward_runs_only_once(twin, head):
    total, _ = twin.linear_cross_entropy(**head())
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        total.backward()


def test_backward_makes_no_second_gradient(twin, head, recorder):
    total, _ = twin.linear_cross_entropy(**head())
    with recorder as seen:
        total.backward()
    assert seen.operations.count("mul_") == 2
    assert not {"mul", "zeros", "zeros_like", "clone", "copy_"} & set(seen.operations)


@pytest.fixture
def in_the_open(monkeypatch):
    """A registered operation hides its work from the recorder: here its body runs by itself."""
    monkeypatch.setattr(chunked_head, "_fwd", torch.no_grad()(chunked_head._forward))


def products(recorder):
    return [name for name in recorder.operations if "mm" in name]


@pytest.mark.usefixtures("in_the_open")
@pytest.mark.parametrize("max_rows", [None, 64])
def test_the_logits_of_all_rows_never_exist(twin, head, recorder, max_rows):
    inputs = head(N=64, D=4, V=1000)
    with recorder as seen:
        twin.linear_cross_entropy(**inputs, chunk=8, max_rows=max_rows)
    assert max(shape[0] for shape in seen.shapes if shape[1:] == (1000,)) == 8


@only_fused
def test_all_chunks_write_their_logits_to_the_same_memory(twin, head, monkeypatch):
    inputs = head(N=64, V=1000)
    chunks = []

    def product(a, b, out):
        # kept, so that no address can be that of a chunk before it by chance
        chunks.extend([out] * (out.shape[1] == 1000))
        return matmul.product(a, b, out)

    monkeypatch.setattr(chunked_head, "product", product)
    twin.linear_cross_entropy(**inputs, chunk=8)
    assert len(chunks) == 8
    assert len({chunk.data_ptr() for chunk in chunks}) == 1


@pytest.mark.usefixtures("in_the_open")
def test_without_gradients_the_sum_is_the_same_and_nothing_else_is_made(twin, head, recorder):
    inputs = head(N=16, D=40, V=30)
    expected, _ = twin.linear_cross_entropy(**inputs, chunk=4)
    plain = {n: x.detach() for n, x in inputs.items()}
    for given, grad_mode in ((inputs, False), (plain, True)):
        with torch.set_grad_enabled(grad_mode), recorder as seen:
            total, _ = twin.linear_cross_entropy(**given, chunk=4)
        assert torch.equal(total, expected.detach())
        assert total > 0
        assert not total.requires_grad
    assert (30, 40) not in seen.shapes  # a gradient of the weight
    assert len(products(seen)) == 2 * 4  # the logits of four chunks, twice


@pytest.mark.usefixtures("in_the_open")
@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_only_the_wanted_gradient_is_made(twin, head, recorder, wanted):
    inputs = head(N=16, D=40, V=30)
    inputs = {n: x if n == wanted else x.detach() for n, x in inputs.items()}
    with recorder as seen:
        twin.linear_cross_entropy(**inputs)
    assert len(products(seen)) == 2  # the logits and that gradient


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_one_gradient_is_the_same_without_the_other(twin, head, wanted):
    inputs = head()
    alone = {n: x if n == wanted else x.detach() for n, x in inputs.items()}
    found = [
        torch.autograd.grad(twin.linear_cross_entropy(**given)[0], inputs[wanted])[0]
        for given in (inputs, alone)
    ]
    assert found[0].any()
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("max_rows", [None, 6])
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, False)])
@only_fused
def test_the_registered_operation_keeps_its_promises(twin, head, dtype, max_rows, wanted):
    hidden, weight, *given = head(N=6, V=24).values()
    hidden, weight = (
        x.detach().to(dtype).requires_grad_(w)
        for x, w in zip((hidden, weight), wanted, strict=True)
    )
    torch.library.opcheck(chunked_head._fwd, (hidden, weight, *given, 4, max_rows, None, *wanted))
