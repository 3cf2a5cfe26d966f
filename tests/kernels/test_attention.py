"""causal_attention: what each position reads, and nothing else."""

from functools import partial

import pytest
import torch
from numerics import assert_twins, wide

from fastbrain import kernels
from fastbrain.kernels import attention, fused, reference


def by_position(q, k, v, scale=None, segments=None):
    """Softmax over the keys that a position sees, one head and one position at a time."""
    B, S, H, K = q.shape
    group = H // k.shape[2]
    scale = K**-0.5 if scale is None else scale
    queries, keys, values = wide(q), wide(k), wide(v)
    out = []
    for b in range(B):
        for i in range(S):
            seen = range(i + 1)
            if segments is not None:
                seen = [j for j in seen if segments[b, j] == segments[b, i]]
            for h in range(H):
                scores = keys[b, seen, h // group] @ queries[b, i, h] * scale
                weights = (scores - scores.max()).exp()
                out.append(weights / weights.sum() @ values[b, seen, h // group])
    return torch.stack(out).view(B, S, H, K).to(q.dtype)


CASES = {
    "one-token": (3, 1, 4, 2, 16),
    "as-many-key-heads": (2, 7, 4, 4, 16),
    "groups-of-2": (2, 7, 4, 2, 16),
    "groups-of-3": (1, 6, 6, 2, 32),  # not a power of two
    "one-key-head": (2, 7, 4, 1, 16),
    "short-of-a-block": (1, 63, 2, 1, 16),
    "a-block": (1, 64, 2, 1, 16),
    "past-a-block": (1, 65, 2, 1, 64),
    "short-of-two-blocks": (1, 127, 2, 1, 32),
    "padded-width": (2, 66, 2, 1, 96),
    "widest": (1, 35, 2, 1, 128),
}


@pytest.fixture
def qkv(randn):
    def make(B, S, H, G, K):
        return {"q": randn(B, S, H, K), "k": randn(B, S, G, K), "v": randn(B, S, G, K)}

    return make


@pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
def test_each_position_mixes_the_values_it_sees(twin, qkv, shape, dtype):
    inputs = qkv(*shape)
    scale = {}
    if shape[1] == 1:  # one weight, always 1: q and k have no influence at all
        product = 4 * float(inputs["k"].detach().abs().max() * inputs["v"].detach().abs().max())
        scale = {"dq": product, "dk": product}
    assert_twins(twin.causal_attention, by_position, inputs, dtype, scale=scale)


@pytest.mark.parametrize("K", [2, 10])
def test_any_even_width_has_a_meaning(qkv, K):
    inputs = qkv(1, 6, 2, 1, K)
    assert_twins(reference.causal_attention, by_position, inputs, torch.float32)


@pytest.mark.parametrize("scale", [0.7, -0.7, 0.0])
def test_the_scale_replaces_the_default(twin, qkv, dtype, scale):
    op = partial(twin.causal_attention, scale=scale)
    truth = {"dq": 1.0, "dk": 1.0} if scale == 0 else {}
    definition = partial(by_position, scale=scale)
    assert_twins(op, definition, qkv(2, 5, 4, 2, 16), dtype, scale=truth)


def test_gradients_are_the_slopes(qkv):
    inputs = [x.detach().double().requires_grad_() for x in qkv(1, 4, 2, 1, 4).values()]
    assert torch.autograd.gradcheck(reference.causal_attention, inputs)


def test_scores_rising_along_the_keys_are_summed_right(twin, qkv):
    # every key overtakes the peak so far: an online softmax must rescale at each of them
    inputs = qkv(1, 70, 2, 1, 16)
    with torch.no_grad():
        inputs["q"].abs_()
        inputs["k"].copy_(torch.arange(70.0)[:, None, None].expand(70, 1, 16) / 10)
    assert_twins(twin.causal_attention, by_position, inputs, torch.float32)


def test_a_hidden_key_weighs_nothing_however_high_its_score(twin, qkv):
    # seen keys score -1e4 and hidden ones 1e4: the exponential of a hidden one would overflow
    inputs = qkv(1, 6, 2, 1, 16)
    with torch.no_grad():
        inputs["q"][..., 0] = 1e2
        inputs["k"][..., 0] = torch.linspace(-4e2, 4e2, 6)[:, None]
    # the highest score takes all the weight, so that q and k have no influence
    product = 4e2 * float(inputs["v"].detach().abs().max())
    scale = {"dq": product, "dk": product}
    assert_twins(twin.causal_attention, by_position, inputs, torch.float32, scale=scale)


def test_huge_scores_stay_finite(twin, qkv):
    inputs = qkv(1, 66, 2, 1, 16)
    with torch.no_grad():
        inputs["q"].mul_(100)
        inputs["k"].mul_(100)
    out = twin.causal_attention(**inputs)
    out.square().sum().backward()
    for x in (out, *(x.grad for x in inputs.values())):
        assert x.isfinite().all()


def test_a_single_token_returns_its_value(twin, qkv):
    inputs = qkv(2, 1, 4, 2, 16)
    out = twin.causal_attention(**inputs)
    assert torch.equal(out, inputs["v"].repeat_interleave(2, dim=2))


@pytest.mark.parametrize("t", [0, 31, 63, 64, 68])
def test_later_tokens_do_not_change_earlier_outputs(twin, qkv, t):
    inputs = qkv(1, 70, 2, 1, 16)
    before = twin.causal_attention(**inputs)
    with torch.no_grad():
        for x in inputs.values():
            x[:, t + 1 :] = 1e4 * torch.rand_like(x[:, t + 1 :])
    after = twin.causal_attention(**inputs)
    assert torch.equal(after[:, : t + 1], before[:, : t + 1])
    assert not torch.equal(after[:, t + 1 :], before[:, t + 1 :])


@pytest.mark.parametrize("t", [0, 33, 65])
def test_an_output_has_no_gradient_for_later_tokens(twin, qkv, t):
    inputs = qkv(1, 66, 2, 1, 16)
    twin.causal_attention(**inputs)[:, t].sum().backward()
    q, k, v = (inputs[n].grad for n in "qkv")
    assert k[:, t + 1 :].count_nonzero() == v[:, t + 1 :].count_nonzero() == 0
    assert q[:, :t].count_nonzero() == q[:, t + 1 :].count_nonzero() == 0
    assert v[:, : t + 1].all(dim=-1).all()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2), (4, 1)], ids=str)
def test_a_group_of_query_heads_reads_its_own_key_head(twin, qkv, heads):
    H, G = heads
    inputs = qkv(2, 5, H, G, 16)
    before = twin.causal_attention(**inputs)
    for g in range(G):
        changed = {n: x.detach().clone() for n, x in inputs.items()}
        changed["k"][:, :, g] += 1
        changed["v"][:, :, g] -= 1
        same = (twin.causal_attention(**changed) == before).all(dim=(0, 1, 3))
        assert [h for h in range(H) if not same[h]] == [h for h in range(H) if h // (H // G) == g]


SEGMENTS = {
    "two-documents": [[0] * 3 + [1] * 4, [0] * 6 + [1]],
    "ids-with-gaps": [[2, 2, 5, 5, 5, 9, 9], [0, 1, 2, 3, 4, 5, 6]],
    "one-document": [[7] * 7, [0] * 7],
}


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_a_segment_sees_only_itself(twin, qkv, tensor, segments, dtype):
    ids = tensor(segments, dtype=torch.int32)
    op = partial(twin.causal_attention, segments=ids)
    assert_twins(op, partial(by_position, segments=ids), qkv(2, 7, 4, 2, 16), dtype)


# at an end of a block, inside of one, over more than one, and the ends of int32
LONG = {
    "at-blocks": [0] * 32 + [1] * 32 + [2] * 64,
    "inside": [-5] * 10 + [0] * 1 + [3] * 60 + [9] * 57,
    "extreme-ids": [-(2**31)] * 40 + [2**31 - 1] * 87,
}


@pytest.mark.parametrize("segments", LONG.values(), ids=LONG)
def test_segments_may_end_anywhere(twin, qkv, tensor, segments):
    ids = tensor([segments], dtype=torch.int32)
    op = partial(twin.causal_attention, segments=ids)
    definition = partial(reference.causal_attention, segments=ids)
    assert_twins(op, definition, qkv(1, len(segments), 2, 1, 64), torch.float32)


def test_segments_may_lie_anywhere_in_memory(twin, qkv, tensor):
    inputs = qkv(2, 7, 2, 1, 16)
    # what lies between and behind are the ids of other documents
    whole = tensor([[0, 5, 0, 7, 1, 8, 1, 9, 1, 9, 2, 9, 2, 9]] * 2 + [[0] * 14], dtype=torch.int32)
    whole[1] += 1
    every_other = whole[:2, ::2]
    one_for_all = whole[:1, :7].expand(2, 7)
    for segments in (every_other, one_for_all):
        assert not segments.is_contiguous()
        expected = twin.causal_attention(**inputs, segments=segments.clone().contiguous())
        found = twin.causal_attention(**inputs, segments=segments)
        assert torch.equal(found, expected)


def test_tiles_outside_of_a_document_are_not_visited(qkv, tensor):
    # a weight of 0 would let NaN through
    ids = tensor([[0] * 64 + [1] * 64], dtype=torch.int32)
    q, k, v = qkv(1, 128, 1, 1, 64).values()
    unread = v.detach().clone()
    unread[:, :64] = float("nan")
    out = fused.causal_attention(q, k, unread, segments=ids)
    (dq,) = torch.autograd.grad(out, q, torch.ones_like(out))
    assert out[:, 64:].isfinite().all()
    assert dq[:, 64:].isfinite().all()
    out = fused.causal_attention(q, k, v, segments=ids)
    incoming = torch.ones_like(out)
    incoming[:, 64:] = float("nan")
    for gradient in torch.autograd.grad(out, [k, v], incoming):
        assert gradient[:, :64].isfinite().all()


def test_packed_segments_equal_separate_calls(twin, qkv, tensor):
    ids = tensor([[0] * 30 + [1] * 40], dtype=torch.int32)

    def separate(q, k, v):
        parts = [slice(0, 30), slice(30, 70)]
        each = (reference.causal_attention(q[:, p], k[:, p], v[:, p]) for p in parts)
        return torch.cat(list(each), dim=1)

    op = partial(twin.causal_attention, segments=ids)
    assert_twins(op, separate, qkv(1, 70, 2, 1, 16), torch.float32)


def test_another_segment_has_no_influence_at_all(twin, qkv, tensor):
    ids = tensor([[0] * 9 + [1] * 5], dtype=torch.int32)
    inputs = qkv(1, 14, 2, 1, 16)
    before = twin.causal_attention(**inputs, segments=ids)
    before[:, 9:].sum().backward()
    assert all(x.grad[:, :9].count_nonzero() == 0 for x in inputs.values())
    with torch.no_grad():
        for x in inputs.values():
            x[:, :9] = 1e4 * torch.rand_like(x[:, :9])
    assert torch.equal(twin.causal_attention(**inputs, segments=ids)[:, 9:], before[:, 9:])


@pytest.mark.parametrize("segmented", [False, True])
def test_views_of_one_projection_equal_copies(twin, device, tensor, segmented):
    B, S, H, G, K = 2, 18, 2, 1, 96  # an unmasked tile and a masked one
    fused = torch.full((B, S, (H + 2 * G) * K + 40), float("nan"), device=device)
    fused[..., 8 : 8 + (H + 2 * G) * K] = torch.randn(B, S, (H + 2 * G) * K, device=device)
    fused.requires_grad_()
    parts = fused[..., 8 : 8 + (H + 2 * G) * K].split([H * K, G * K, G * K], dim=-1)
    views = [p.unflatten(-1, (-1, K)) for p in parts]
    copies = [p.detach().clone().requires_grad_() for p in views]
    segments = tensor([[0] * 4 + [1] * 14] * 2, dtype=torch.int32) if segmented else None
    # keys last, so that NaN follows them
    (q, v, k), (q_copy, v_copy, k_copy) = views, copies
    ours = twin.causal_attention(q, k, v, segments=segments)
    theirs = twin.causal_attention(q_copy, k_copy, v_copy, segments=segments)
    incoming = torch.randn_like(ours)
    ours.backward(incoming)
    theirs.backward(incoming)
    assert torch.equal(ours, theirs)
    gradients = torch.cat([c.grad.flatten(2) for c in copies], dim=-1)
    assert torch.equal(fused.grad[..., 8:-32], gradients)
    assert fused.grad[..., :8].count_nonzero() == fused.grad[..., -32:].count_nonzero() == 0


@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_is_contiguous_in_the_dtype_of_the_queries(twin, device, dtype, segmented):
    q = torch.randn(2, 5, 4, 16, device=device).to(dtype)
    segments = torch.zeros(2, 5, dtype=torch.int32, device=device) if segmented else None
    out = twin.causal_attention(q, q[:, :, :2], q[:, :, 2:], segments=segments)
    assert out.is_contiguous()
    assert (out.shape, out.dtype) == (q.shape, dtype)


@pytest.mark.parametrize(("S", "segmented"), [(63, True), (64, False), (65, False), (65, True)])
def test_nothing_is_read_or_written_past_the_last_position(qkv, tensor, monkeypatch, S, segmented):
    """Every tensor of a kernel is followed by NaN, which must neither spread nor disappear."""

    def guarded(kernel, grid, *args, **options):
        room = {
            n: torch.cat(
                [
                    x.flatten(),
                    x.new_full((4096,), float("nan") if x.dtype.is_floating_point else -7),
                ]
            )
            for n, x in enumerate(args)
            if isinstance(x, torch.Tensor)
        }
        given = [room[n][:-4096].view(x.shape) if n in room else x for n, x in enumerate(args)]
        launch(kernel, grid, *given, **options)
        for n, whole in room.items():
            args[n].copy_(given[n])
            assert whole[-4096:].isnan().all() or not whole.dtype.is_floating_point

    launch = attention.launch
    inputs = qkv(1, S, 2, 1, 16)
    segments = tensor([[0] * 20 + [1] * (S - 20)], dtype=torch.int32) if segmented else None
    found = []
    for start in (launch, guarded):
        monkeypatch.setattr(attention, "launch", start)
        out = fused.causal_attention(**inputs, segments=segments)
        found.append([out, *torch.autograd.grad(out.square().sum(), list(inputs.values()))])
    for plain, among_nan in zip(*found, strict=True):
        assert torch.equal(plain, among_nan)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((3, 2, 2, 16), (2**30 + 16, 32, 16)),
        ((1, 2, 3, 16), (64, 16, 2**30 + 16)),
        ((1, 130, 1, 16), (64, 2**24 + 16, 16)),
    ],
    ids=["sequences", "heads", "positions"],
)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_elements_may_lie_past_2_to_the_31(device, far, name, shape, strides):
    inputs = {n: torch.randn(shape, device=device).bfloat16() for n in "qkv"}
    found = []
    for given in (inputs | {name: far(inputs[name], *strides)}, inputs):
        leaves = {n: x.detach().requires_grad_() for n, x in given.items()}
        out = fused.causal_attention(**leaves)
        found.append([out, *torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_last_axis_may_be_strided(device):
    transposed = [torch.randn(1, 5, 16, n, device=device).requires_grad_() for n in (2, 1, 1)]
    copies = [x.detach().transpose(2, 3).contiguous().requires_grad_() for x in transposed]
    ours = fused.causal_attention(*(x.transpose(2, 3) for x in transposed))
    theirs = fused.causal_attention(*copies)
    assert torch.equal(ours, theirs)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    for x, copy in zip(transposed, copies, strict=True):
        assert torch.equal(x.grad.transpose(2, 3), copy.grad)


def test_repeated_runs_give_the_same_bits(twin, qkv, device):
    # an interpreter has no race to lose
    S, runs = (1000, 40) if device.type == "cuda" else (17, 3)
    inputs = list(qkv(1, S, 2, 1, 16).values())
    incoming = torch.randn(1, S, 2, 16, device=device)

    def run():
        out = twin.causal_attention(*inputs)
        return [out, *torch.autograd.grad(out, inputs, incoming)]

    first = run()
    for _ in range(runs - 1):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


def test_backward_keeps_the_inputs_the_output_and_one_number_a_row(qkv):
    inputs = qkv(2, 9, 4, 2, 16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = fused.causal_attention(**inputs)
    pointers = {x.data_ptr() for x in (*inputs.values(), out)}
    (lse,) = (x for x in kept if x.data_ptr() not in pointers)
    assert {x.data_ptr() for x in kept} == pointers | {lse.data_ptr()}
    assert (lse.shape, lse.dtype) == ((2, 4, 9), torch.float32)


def test_other_widths_go_to_the_reference(qkv, monkeypatch):
    monkeypatch.setattr(kernels, "runs_kernels", lambda device: True)
    monkeypatch.setattr(fused, "causal_attention", lambda *args: "kernels")
    monkeypatch.setattr(reference, "causal_attention", lambda *args: "reference")
    for K in range(2, 260, 2):
        x = torch.empty(1, 1, 1, K, device="meta")
        covered = K in (16, 32, 64, 96, 128)
        assert kernels.causal_attention(x, x, x) == ("kernels" if covered else "reference")


def test_the_kernels_refuse_other_widths(qkv):
    with pytest.raises(ValueError, match=r"head width must be one of .*, got 24"):
        fused.causal_attention(**qkv(1, 2, 2, 1, 24))


@pytest.mark.parametrize("segmented", [False, True])
def test_the_registered_operations_pass_torchs_checks(qkv, tensor, segmented):
    q, k, v = qkv(1, 5, 2, 1, 16).values()
    segments = tensor([[0, 0, 1, 1, 1]], dtype=torch.int32) if segmented else None
    torch.library.opcheck(attention._fwd, (q, k, v, segments, 0.25))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = attention._fwd(q, k, v, segments, 0.25)
    torch.library.opcheck(attention._bwd, (q, k, v, segments, out, lse, out.clone(), 0.25))


def test_it_compiles_into_one_graph(qkv):
    inputs = list(qkv(1, 5, 2, 1, 16).values())
    compiled = torch.compile(kernels.causal_attention, fullgraph=True, backend="aot_eager")
    with kernels.use(fused):
        found = []
        for op in (kernels.causal_attention, compiled):
            out = op(*inputs)
            found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
