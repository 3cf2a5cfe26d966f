"""masked_cross_entropy and linear_cross_entropy: a sum over the rows that count, and no others."""

from functools import partial

import pytest
import torch
from numerics import assert_twins, wide

from fastbrain.kernels import reference


def by_row(logits, targets, mask):
    """The negative log-likelihood of each row that counts, added up."""
    rows = wide(logits)
    total = rows[:0].sum()
    for n in mask.nonzero().flatten().tolist():
        shifted = rows[n] - rows[n].max().detach()
        total = total + shifted.exp().sum().log() - shifted[targets[n]]
    return total, mask.sum()


def by_product(hidden, weight, targets, mask):
    """The same, of logits that are all there at once."""
    return by_row(wide(hidden) @ wide(weight).T, targets, mask)


@pytest.fixture
def labels(device):
    """Targets and a mask of which about half the rows count."""

    def make(N, V):
        targets = torch.randint(V, (N,), device=device)
        return {"targets": targets, "mask": torch.rand(N, device=device) < 0.5}

    return make


WIDTHS = {"one-word": (3, 1), "few": (9, 5), "one-row": (1, 50), "below-a-block": (4, 2047)}
WIDTHS |= {"above-a-block": (4, 2049), "a-vocabulary": (2, 32_000)}


@pytest.mark.parametrize("shape", WIDTHS.values(), ids=WIDTHS)
def test_the_loss_adds_up_the_rows_that_count(randn, labels, shape, dtype):
    inputs = {"logits": randn(*shape), **labels(*shape)}
    inputs["mask"][0] = True
    scale = {"out0": shape[0], "dlogits": 1.0}  # of one word the loss is 0, whatever the logits
    assert_twins(reference.masked_cross_entropy, by_row, inputs, dtype, scale=scale)


def test_gradients_are_the_slopes(randn, labels):
    logits = randn(4, 5).detach().double().requires_grad_()
    given = labels(4, 5)
    assert torch.autograd.gradcheck(lambda x: reference.masked_cross_entropy(x, **given)[0], logits)


@pytest.mark.parametrize("descending", [False, True])
def test_logits_in_order_are_summed_right(twin, tensor, descending):
    # each logit overtakes the peak so far; the target is the last column
    logits = torch.arange(3000.0).div(10).repeat(2, 1)
    logits = logits.flip(1) if descending else logits
    inputs = {
        "logits": tensor(logits.tolist(), requires_grad=True),
        "targets": tensor([2999, 0]),
        "mask": tensor([True, True]),
    }
    assert_twins(twin.masked_cross_entropy, by_row, inputs, torch.float32)


def test_huge_logits_stay_finite(twin, randn, labels):
    inputs = {"logits": randn(6, 40), **labels(6, 40)}
    with torch.no_grad():
        inputs["logits"].mul_(1e4)
    assert_twins(twin.masked_cross_entropy, by_row, inputs, torch.float32)


def test_bf16_logits_are_summed_in_fp32(twin, randn, labels):
    logits, given = randn(40, 300).detach().bfloat16(), labels(40, 300)
    narrow, wide_ = (twin.masked_cross_entropy(x, **given)[0] for x in (logits, logits.float()))
    assert torch.equal(narrow, wide_)


def test_rows_of_logits_may_lie_apart(twin, device, labels):
    wider = torch.full((5, 60), float("nan"), device=device)
    wider[:, 7:47] = torch.randn(5, 40, device=device)
    wider.requires_grad_()
    copy = wider.detach()[:, 7:47].clone().requires_grad_()
    given = labels(5, 40)
    ours, _ = twin.masked_cross_entropy(wider[:, 7:47], **given)
    theirs, _ = twin.masked_cross_entropy(copy, **given)
    (ours + theirs).backward()
    assert torch.equal(ours, theirs)
    assert torch.equal(wider.grad[:, 7:47], copy.grad)
    assert wider.grad[:, :7].count_nonzero() == wider.grad[:, 47:].count_nonzero() == 0


def test_logits_are_left_as_they_were(twin, randn, labels):
    logits = randn(6, 40)
    before = logits.detach().clone()
    twin.masked_cross_entropy(logits, **labels(6, 40))[0].backward()
    assert torch.equal(logits, before)


@pytest.fixture(params=["masked", "linear", "linear-compacted"])
def loss(request, twin, randn):
    """Either loss as a function of targets and mask, and its leaves: 8 rows over 11 words."""
    if request.param == "masked":
        leaves = [randn(8, 11)]
        return partial(twin.masked_cross_entropy, *leaves), leaves
    leaves = [randn(8, 6), randn(11, 6)]
    max_rows = 8 if request.param == "linear-compacted" else None
    return partial(twin.linear_cross_entropy, *leaves, chunk=3, max_rows=max_rows), leaves


@pytest.mark.parametrize("never_used", [-1, -100, 11, 2**40])
def test_a_masked_target_is_never_used(loss, tensor, never_used):
    compute, leaves = loss
    mask = tensor([True, False, True, False] * 2)
    ordinary = tensor([3, 0, 10, 0, 7, 0, 1, 0])
    results = []
    for targets in (ordinary, torch.where(mask, ordinary, never_used)):
        total, count = compute(targets=targets, mask=mask)
        results.append([total, count, *torch.autograd.grad(total, leaves)])
    for plain, strange in zip(*results, strict=True):
        assert torch.equal(plain, strange)
        assert plain.isfinite().all()


@pytest.mark.parametrize("bad", [-1, -100, 11, 2**40])
def test_a_target_outside_the_vocabulary_that_counts_makes_the_sum_nan(loss, tensor, bad):
    mask = tensor([True, False] * 4)
    total, count = loss[0](targets=tensor([0, 1, 2, 3, bad, 5, 6, 7]), mask=mask)
    assert total.isnan()
    assert count == 4


def test_without_a_row_that_counts_everything_is_zero(loss, tensor):
    compute, leaves = loss
    total, count = compute(targets=tensor([-1] * 8), mask=tensor([False] * 8))
    assert total == count == 0
    (total / count.clamp(min=1)).backward()
    for leaf in leaves:
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("filler", [float("nan"), float("inf"), float("-inf")])
def test_a_masked_row_may_hold_anything(loss, tensor, filler):
    compute, leaves = loss
    mask = tensor([True, False, False, True] * 2)
    targets = tensor([0, 1, 2, 3, 4, 5, 6, 7])
    expected, _ = compute(targets=targets, mask=mask)
    gradients = torch.autograd.grad(expected, leaves)
    with torch.no_grad():
        leaves[0][~mask] = filler
    total, _ = compute(targets=targets, mask=mask)
    total.backward()
    assert torch.equal(total, expected)
    assert leaves[0].grad[~mask].count_nonzero() == 0
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert torch.equal(leaf.grad, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_fp32_and_the_count_an_integer(twin, randn, labels, dtype):
    hidden, weight = randn(8, 6).to(dtype), randn(11, 6).to(dtype)
    given = labels(8, 11)
    for total, count in (
        twin.masked_cross_entropy(hidden @ weight.T, **given),
        twin.linear_cross_entropy(hidden, weight, **given),
    ):
        assert (total.dtype, total.shape) == (torch.float32, ())
        assert (count.dtype, count.shape) == (torch.int64, ())
        assert count == given["mask"].sum()


@pytest.fixture
def head(randn, labels):
    """Inputs of linear_cross_entropy."""

    def make(N=21, D=6, V=50):
        weight = (randn(V, D).detach() / D**0.5).requires_grad_()
        return {"hidden": randn(N, D), "weight": weight, **labels(N, V)}

    return make


@pytest.mark.parametrize("max_rows", [None, 21])
@pytest.mark.parametrize("chunk", [1, 20, 21, 22, 2048])
def test_the_linear_loss_is_that_of_the_product(head, chunk, max_rows, dtype):
    op = partial(reference.linear_cross_entropy, chunk=chunk, max_rows=max_rows)
    assert_twins(op, by_product, head(), dtype)


def test_a_shadow_is_multiplied_and_its_master_gets_the_gradient(head):
    inputs = head()
    shadow = (3 * inputs["weight"].detach()).bfloat16()

    def definition(hidden, weight, targets, mask):
        used = weight + (shadow.to(weight.dtype) - weight).detach()
        return by_product(hidden, used, targets, mask)

    op = partial(reference.linear_cross_entropy, shadow=shadow)
    assert_twins(op, definition, inputs, torch.bfloat16, fp32=["weight"])


@pytest.mark.parametrize("spare", [0, 1, 100])
def test_compacted_rows_give_the_same_loss(twin, head, spare):
    inputs = head()
    max_rows = int(inputs["mask"].sum()) + spare
    compacted = partial(twin.linear_cross_entropy, chunk=4, max_rows=max_rows)
    assert_twins(compacted, twin.linear_cross_entropy, inputs, torch.float32)


def test_more_rows_than_max_rows_make_the_sum_nan(twin, head):
    inputs = head()
    count = int(inputs["mask"].sum())
    total, counted = twin.linear_cross_entropy(**inputs, max_rows=count - 1)
    assert total.isnan()
    assert counted == count


def test_max_rows_may_be_zero(twin, head):
    inputs = head()
    inputs["mask"][:] = False
    total, count = twin.linear_cross_entropy(**inputs, max_rows=0)
    total.backward()
    assert total == count == 0
    assert inputs["weight"].grad.count_nonzero() == inputs["hidden"].grad.count_nonzero() == 0


def test_backward_runs_only_once(twin, head):
    total, _ = twin.linear_cross_entropy(**head())
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        total.backward()


@pytest.mark.parametrize("max_rows", [None, 64])
def test_the_logits_of_all_rows_never_exist(head, recorder, max_rows):
    inputs = head(N=64, D=4, V=1000)
    with recorder as seen:
        total, _ = reference.linear_cross_entropy(**inputs, chunk=8, max_rows=max_rows)
        total.backward()
    assert max(shape.numel() for shape in seen.shapes) == 8 * 1000


def products(recorder):
    return [name for name in recorder.operations if "mm" in name]


def test_without_gradients_the_sum_is_the_same_and_nothing_else_is_made(head, recorder):
    inputs = head(N=16, D=40, V=30)
    expected, _ = reference.linear_cross_entropy(**inputs, chunk=4)
    plain = {n: x.detach() for n, x in inputs.items()}
    for given, grad_mode in ((inputs, False), (plain, True)):
        with torch.set_grad_enabled(grad_mode), recorder as seen:
            total, _ = reference.linear_cross_entropy(**given, chunk=4)
        assert torch.equal(total, expected.detach())
        assert total > 0
        assert not total.requires_grad
    assert (30, 40) not in seen.shapes  # a gradient of the weight
    assert len(products(seen)) == 2 * 4  # the logits of four chunks, twice


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_only_the_wanted_gradient_is_made(head, recorder, wanted):
    inputs = head(N=16, D=40, V=30)
    inputs = {n: x if n == wanted else x.detach() for n, x in inputs.items()}
    with recorder as seen:
        total, _ = reference.linear_cross_entropy(**inputs)
        total.backward()
    assert inputs[wanted].grad.any()
    assert len(products(seen)) == 2  # the logits and that gradient
