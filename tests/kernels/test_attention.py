"""causal_attention: what each position reads, and nothing else."""

from functools import partial

import pytest
import torch
from numerics import assert_twins, wide

from fastbrain.kernels import reference


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
    "one-token": (3, 1, 4, 2, 8),
    "as-many-key-heads": (2, 7, 4, 4, 16),
    "groups-of-2": (2, 7, 4, 2, 16),
    "groups-of-3": (1, 6, 6, 2, 10),  # not a power of two, and a width of none
    "one-key-head": (2, 7, 4, 1, 16),
    "short-of-a-block": (1, 63, 2, 1, 16),
    "a-block": (1, 64, 2, 1, 16),
    "past-a-block": (1, 65, 2, 1, 32),
    "short-of-two-blocks": (1, 127, 2, 1, 8),
    "widest": (1, 5, 2, 1, 128),
}


@pytest.fixture
def qkv(randn):
    def make(B, S, H, G, K):
        return {"q": randn(B, S, H, K), "k": randn(B, S, G, K), "v": randn(B, S, G, K)}

    return make


@pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
def test_each_position_mixes_the_values_it_sees(qkv, shape, dtype):
    inputs = qkv(*shape)
    scale = {}
    if shape[1] == 1:  # one weight, always 1: q and k have no influence at all
        product = 4 * float(inputs["k"].detach().abs().max() * inputs["v"].detach().abs().max())
        scale = {"dq": product, "dk": product}
    assert_twins(reference.causal_attention, by_position, inputs, dtype, scale=scale)


def test_the_scale_replaces_the_default(qkv, dtype):
    op = partial(reference.causal_attention, scale=0.7)
    assert_twins(op, partial(by_position, scale=0.7), qkv(2, 5, 4, 2, 8), dtype)


def test_gradients_are_the_slopes(qkv):
    inputs = [x.detach().double().requires_grad_() for x in qkv(1, 4, 2, 1, 4).values()]
    assert torch.autograd.gradcheck(reference.causal_attention, inputs)


def test_scores_rising_along_the_keys_are_summed_right(qkv):
    # every key overtakes the peak so far: an online softmax must rescale at each of them
    inputs = qkv(1, 70, 2, 1, 16)
    with torch.no_grad():
        inputs["q"].abs_()
        inputs["k"].copy_(torch.arange(70.0)[:, None, None].expand(70, 1, 16) / 10)
    assert_twins(reference.causal_attention, by_position, inputs, torch.float32)


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
    inputs = qkv(2, 70, 4, 2, 16)
    before = twin.causal_attention(**inputs)
    with torch.no_grad():
        for x in inputs.values():
            x[:, t + 1 :] = 1e4 * torch.rand_like(x[:, t + 1 :])
    after = twin.causal_attention(**inputs)
    assert torch.equal(after[:, : t + 1], before[:, : t + 1])
    assert not torch.equal(after[:, t + 1 :], before[:, t + 1 :])


@pytest.mark.parametrize("t", [0, 33, 65])
def test_an_output_has_no_gradient_for_later_tokens(twin, qkv, t):
    inputs = qkv(2, 66, 4, 2, 16)
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
def test_a_segment_sees_only_itself(qkv, tensor, segments, dtype):
    ids = tensor(segments, dtype=torch.int32)
    op = partial(reference.causal_attention, segments=ids)
    assert_twins(op, partial(by_position, segments=ids), qkv(2, 7, 4, 2, 8), dtype)


def test_packed_segments_equal_separate_calls(twin, qkv, tensor):
    ids = tensor([[0] * 30 + [1] * 40] * 2, dtype=torch.int32)

    def separate(q, k, v):
        parts = [slice(0, 30), slice(30, 70)]
        return torch.cat([twin.causal_attention(q[:, p], k[:, p], v[:, p]) for p in parts], dim=1)

    op = partial(twin.causal_attention, segments=ids)
    assert_twins(op, separate, qkv(2, 70, 4, 2, 16), torch.float32)


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
    B, S, H, G, K = 2, 9, 4, 2, 96
    fused = torch.full((B, S, (H + 2 * G) * K + 40), float("nan"), device=device)
    fused[..., 8 : 8 + (H + 2 * G) * K] = torch.randn(B, S, (H + 2 * G) * K, device=device)
    fused.requires_grad_()
    parts = fused[..., 8 : 8 + (H + 2 * G) * K].split([H * K, G * K, G * K], dim=-1)
    views = [p.unflatten(-1, (-1, K)) for p in parts]
    copies = [p.detach().clone().requires_grad_() for p in views]
    segments = tensor([[0] * 4 + [1] * 5] * 2, dtype=torch.int32) if segmented else None
    ours = twin.causal_attention(*views, segments=segments)
    theirs = twin.causal_attention(*copies, segments=segments)
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
