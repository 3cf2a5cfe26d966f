"""The kernels of adam_step and grad_norm: tables, addresses, graphs, and PyTorch's rules."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from adam_cases import LISTS, MANY, make_case
from torch.library import opcheck

from fastbrain import kernels
from fastbrain.kernels import adam, fused
from fastbrain.optim import FusedAdam

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def case(device):
    return partial(make_case, device)


def test_tables_are_built_once_for_the_same_tensors(case, monkeypatch):
    built = []

    def counting(rows, block, device):
        built.append(rows)
        return build(rows, block, device)

    build = adam._build
    monkeypatch.setattr(adam, "_build", counting)
    monkeypatch.setattr(adam, "_tables", {})
    given = case((1500,), (4,))
    for _ in range(3):
        given.run(fused)
        fused.grad_norm(given.grads)
    assert len(built) == 2
    # only so many bytes stay, those of the tables used of late
    kept = sum(x.nbytes for tables in adam._tables.values() for x in tables)
    monkeypatch.setattr(adam, "_KEPT_BYTES", kept)
    given.grads = [g.clone() for g in given.grads]
    given.run(fused)
    assert (len(built), len(adam._tables)) == (3, 2)
    given.run(fused)
    assert (len(built), len(adam._tables)) == (3, 2)


def test_another_decay_or_gradient_is_not_taken_from_an_old_table(twin, case):
    given = case((1500,), (4,))
    for change in (
        {},
        {"weight_decays": [0.5, 0.1]},
        {"grads": [g.bfloat16() for g in given.grads]},
        {"grads": [given.grads[0], torch.empty(0, device=given.grads[0].device)]},
    ):
        ours = replace(given, **change)
        expected = ours.stepped(twin)
        assert (
            replace(ours.stepped_in_place(twin), grads=[]).bits()
            == replace(expected, grads=[]).bits()
        )


def test_rates_steps_and_scales_compile_nothing_anew(monkeypatch, device):
    kinds = set()

    def noting(kernel, grid, *args, **options):
        plain = tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in args)
        kinds.add((kernel.__name__, plain, tuple(sorted(options.items()))))
        launch(kernel, grid, *args, **options)

    launch = adam.launch
    monkeypatch.setattr(adam, "launch", noting)
    p = torch.ones(3, device=device, requires_grad=True)
    p.grad = torch.ones(3, device=device)
    optimizer = FusedAdam([p])
    with kernels.use(fused):
        for i in range(20):
            optimizer.param_groups[0]["lr"] = 1e-3 / (i + 1)
            optimizer.step()
    assert sorted(name for name, *_ in kinds) == ["_count_kernel", "_step_kernel"]


@pytest.fixture
def from_the_last_blocks_on(monkeypatch):
    """Of 2^31 elements and some, only those past 2^31 get programs."""

    def with_rest(rows, block, device):
        *addresses, size, _, flags, bits = rows[0]
        owner, table = build(((*addresses, size - 2**31, 0, flags, bits),), block, device)
        table[:, 5], table[:, 6] = size, -(2**31) // block
        return owner, table

    build = adam._build
    monkeypatch.setattr(adam, "_build", with_rest)
    monkeypatch.setattr(adam, "_blocks", lambda rows, block: -((2**31 - rows[0][5]) // block))


@pytest.mark.skipif(torch.cuda.is_available(), reason="40 GB are too many for a card")
def test_elements_past_two_to_the_31_are_reached(case, hollow, request):
    last = case((1500,), step=1, weight_decays=[0.1])
    expected = last.stepped(fused)
    for name in LISTS:
        (small,) = getattr(last, name)
        large = hollow(2**31 + 1500, small.dtype)
        large[2**31 :].copy_(small)
        getattr(last, name)[0] = large
    request.getfixturevalue("from_the_last_blocks_on")
    last.run(fused)
    for name in LISTS:
        assert torch.equal(getattr(last, name)[0][2**31 :], getattr(expected, name)[0])
        assert not getattr(last, name)[0][2**31 - 2048 : 2**31].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_counts_elements_past_two_to_the_31(device, hollow, request, dtype):
    near = torch.randn(5000, device=device).to(dtype)
    expected = fused.grad_norm([near])
    large = hollow(2**31 + 5000, dtype)
    large[2**31 :].copy_(near)
    request.getfixturevalue("from_the_last_blocks_on")
    assert torch.equal(fused.grad_norm([large]), expected)


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["g-fp32", "g-bf16"])
def test_one_tensor_off_16_bytes_takes_whole_vectors_from_all(case, name, kind):
    given = case((2500,))
    given.grads = [g.to(kind) for g in given.grads]
    tensors = {n: getattr(given, n)[0] for n in LISTS}
    x = tensors[name]
    for start in (0, 1, 2, 4, 8, 16):
        moved = torch.cat([x[:start], x])[start:]
        *_, flags, _ = adam._row(*(tensors | {name: moved}).values(), 0.0)
        assert bool(flags & adam._ALIGNED.value) == (start * x.itemsize % 16 == 0)
        assert bool(flags & adam._NARROW.value) == (kind == torch.bfloat16)


def test_what_the_kernel_cannot_address_is_refused_by_name(case):
    with pytest.raises(ValueError, match=r"params\[0\] must be float32"):
        case().copy(torch.float64).run(fused)
    away = case()
    away.exp_avgs[1] = away.exp_avgs[1].to("meta")
    with pytest.raises(ValueError, match=r"exp_avgs\[1\] must be float32 on"):
        away.run(fused)
    with pytest.raises(ValueError, match=r"grads\[1\] must be float32 or bfloat16"):
        fused.grad_norm([torch.ones(2), torch.ones(2).double()])


def test_the_operators_keep_the_rules_of_pytorch(case):
    given = case((5,), (1030,), weight_decays=[0.1, 0.0])
    lists = [getattr(given, name) for name in LISTS]
    opcheck(adam._step_op, (*lists, *given.scalars(), [0.9, 0.99], 1e-8, [0.1, 0.0]))
    opcheck(adam._norm_op, (given.grads,))


def test_compiling_changes_nothing(case):
    ours, theirs = (c.copy() for c in [case((5,), (1030,), step=2)] * 2)
    with kernels.use(fused):

        def step(case, scalars):
            case.launch(kernels, scalars)
            return kernels.grad_norm(case.grads)

        scalars = ours.scalars()
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(ours, scalars), kernels.grad_norm(theirs.grads))
        ours.step = int(scalars.step)
        theirs.run(kernels)
    assert ours.bits() == theirs.bits()


@pytest.mark.gpu
@needs_cuda
def test_a_graph_replayed_with_new_rates_takes_the_steps(case):
    eager = case(*MANY, step=4, weight_decays=[0.1] * len(MANY))
    captured = eager.copy()
    scalars = captured.scalars()
    scalars.skip.fill_(1)
    captured.launch(fused, scalars)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.launch(fused, scalars)
    scalars.skip.fill_(0)
    for rate in (1e-3, 3e-2, 1e-4):
        scalars.lr.fill_(rate)
        graph.replay()
        eager.lr = rate
        eager.run(fused)
    captured.step = int(scalars.step)
    assert captured.step == 7
    assert captured.bits() == eager.bits()


@pytest.mark.gpu
@needs_cuda
def test_a_graph_of_tensors_never_seen_is_refused(case):
    fresh = case((77,))
    scalars = fresh.scalars()
    with (
        pytest.raises(ValueError, match="before capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        fresh.launch(fused, scalars)
