"""masked_cross_entropy and linear_cross_entropy: a sum over the rows that count, and no others."""

from functools import partial

import pytest
import torch
from numerics import assert_twins, wide

from fastbrain import kernels
from fastbrain.kernels import cross_entropy, fused, reference


def by_row(logits, targets, mask):
    """The negative log-likelihood of each row that counts, added up."""
    rows = wide(logits)
    total = rows[:0].sum()
    for n in mask.nonzero().flatten().tolist():
        shifted = rows[n] - rows[n].max().detach()
        total = total + shifted.exp().sum().log() - shifted[targets[n]]
    return total, mask.sum()


@pytest.fixture
def labels(device):
    """Targets and a mask of which about half the rows count."""

    def make(N, V):
        targets = torch.randint(V, (N,), device=device)
        return {"targets": targets, "mask": torch.rand(N, device=device) < 0.5}

    return make


# the kernel reads 2048 columns at a time, in vectors of 8 where the width is a multiple of 8
WIDTHS = {"one-word": (3, 1), "few": (9, 5), "one-row": (1, 50), "below-a-block": (4, 2047)}
WIDTHS |= {"a-block": (4, 2048), "above-a-block": (4, 2049), "a-vector-above": (4, 2056)}
WIDTHS |= {"many-rows": (40, 24), "a-vocabulary": (2, 32_000)}


@pytest.mark.parametrize("shape", WIDTHS.values(), ids=WIDTHS)
def test_the_loss_adds_up_the_rows_that_count(twin, randn, labels, shape, dtype):
    inputs = {"logits": randn(*shape), **labels(*shape)}
    inputs["mask"][0] = True
    inputs["targets"][0] = shape[1] - 1  # the last column, alone past a block of 2048 in one case
    scale = {"out0": shape[0], "dlogits": 1.0}  # of one word the loss is 0, whatever the logits
    assert_twins(twin.masked_cross_entropy, by_row, inputs, dtype, scale=scale)


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


def test_an_offset_common_to_all_logits_costs_no_digits(twin, randn, labels):
    # the loss is a small difference of numbers that have no digits left for it
    inputs = {"logits": randn(6, 3000), **labels(6, 3000)}
    inputs["mask"][0] = True
    with torch.no_grad():
        inputs["logits"].add_(2e4)
    assert_twins(twin.masked_cross_entropy, by_row, inputs, torch.float32)


@pytest.mark.parametrize("forbidden", [slice(0, 2100), slice(1000, 5000)])
def test_forbidden_words_have_no_probability(twin, randn, tensor, forbidden):
    # whole blocks of logits at -inf, before or after those that count
    logits = randn(1, 5000)
    with torch.no_grad():
        logits[:, forbidden] = float("-inf")
    inputs = {"logits": logits, "targets": tensor([int(logits.argmax())]), "mask": tensor([True])}
    assert_twins(twin.masked_cross_entropy, by_row, inputs, torch.float32)


def test_bf16_logits_are_summed_in_fp32_and_their_gradients_rounded_once(twin, randn, labels):
    logits, given = randn(40, 300).detach().bfloat16(), labels(40, 300)
    found = []
    for leaf in (logits.requires_grad_(), logits.detach().float().requires_grad_()):
        total, _ = twin.masked_cross_entropy(leaf, **given)
        found.append((total, torch.autograd.grad(total, leaf)[0].bfloat16()))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("width", [60, 64])
def test_rows_of_logits_may_lie_apart(twin, device, labels, width):
    wider = torch.full((5, width), float("nan"), device=device)
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


def test_equal_calls_give_the_same_bits(loss, tensor, device):
    compute, leaves = loss
    given = {"targets": tensor([3, 0, 10, 0, 7, 0, 1, 0]), "mask": tensor([True, False] * 4)}
    seen = []
    for _ in range(40 if device.type == "cuda" else 5):
        total, _ = compute(**given)
        seen.append([total, *torch.autograd.grad(total, leaves)])
    for again in seen:
        assert all(map(torch.equal, again, seen[0]))


def assert_same_rows(operation, far, near, targets, mask):
    """Equal sums of rows that lie far from each other and side by side, and equal gradients."""
    found = []
    for logits in (far, near):
        logits.requires_grad_()
        total, _ = operation(logits, targets[-len(logits) :], mask[-len(logits) :])
        found.append((total, torch.autograd.grad(total, logits)[0][-len(near) :]))
    assert found[0][1].any()
    assert all(map(torch.equal, *found))


def test_rows_past_2_to_the_31_elements_are_found(twin, tensor, far):
    near = tensor([[0.0] * 40] * 3).normal_().bfloat16()
    targets, mask = tensor([3, 0, 39]), tensor([True, False, True])
    assert_same_rows(twin.masked_cross_entropy, far(near, 2**30), near, targets, mask)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_logits_past_2_to_the_32_elements_are_found(device):
    if torch.cuda.mem_get_info()[0] < 18 * 2**30:
        pytest.skip("logits and gradients take 17 GB")
    far = torch.zeros(2**16 + 8, 2**16, dtype=torch.bfloat16, device=device)
    near = far[-2:].normal_().clone()
    targets = torch.arange(len(far), device=device) % far.shape[1]
    mask = torch.arange(len(far), device=device) >= len(far) - 2
    assert_same_rows(fused.masked_cross_entropy, far, near, targets, mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_registered_operations_keep_their_promises(randn, labels, dtype):
    logits, given = randn(6, 24).detach().to(dtype), labels(6, 24)
    torch.library.opcheck(cross_entropy._fwd, (logits.requires_grad_(), *given.values()))
    logits = logits.detach()
    _, peaks, log_sums = cross_entropy._fwd(logits, *given.values())
    arguments = (logits, *given.values(), peaks, log_sums, logits.new_tensor(2.0).float())
    torch.library.opcheck(cross_entropy._bwd, arguments)


@pytest.mark.parametrize("loss", ["masked", "linear-compacted"], indirect=True)
@pytest.mark.parametrize("twin", [fused], ids=["fused"])
def test_the_loss_compiles_in_one_piece(loss, twin, tensor):
    operation, leaves = loss
    facade = getattr(kernels, operation.func.__name__)
    given = {"targets": tensor([3, 0, 10, 0, 7, 0, 1, 0]), "mask": tensor([True, False] * 4)}
    compute = partial(facade, *leaves, **operation.keywords, **given)
    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
    found = []
    with kernels.use(fused):
        for run in (compute, compiled):
            total, count = run()
            found.append([total, count, *torch.autograd.grad(3 * total, leaves)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("twin", [fused], ids=["fused"])
def test_the_linear_loss_compiles_once_for_all_numbers_of_rows(twin, randn):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda hidden, weight, targets, mask: kernels.linear_cross_entropy(
            hidden, weight, targets, mask, chunk=3
        )[0],
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    weight = randn(7, 4)
    # PyTorch gives up after eight graphs
    for N in range(2, 13):
        targets, mask = weight.new_zeros(N).long(), weight.new_ones(N).bool()
        with kernels.use(twin):
            assert compiled(randn(N, 4), weight, targets, mask).isfinite()
