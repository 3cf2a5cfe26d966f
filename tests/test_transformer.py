"""The module: its map to the crate's tensors, its gradients, and what a position may depend on."""

from dataclasses import replace

import pytest
import torch
from models import DENSE, MOE, SHAPES, batch, model, random_ids

from fastbrain import SequenceTooLong, TransformerConfig
from fastbrain.optim import FusedAdam
from fastbrain.transformer import Transformer, initialize, named_views, pieces

UNTIED = replace(MOE, tie_embeddings=False, shared_expert=False, moe_layers=(0,))
ONE_WIDE = replace(MOE, moe_d_ff=1, num_experts=1, experts_per_token=1)


@pytest.mark.parametrize(
    "config", [DENSE, MOE, UNTIED, ONE_WIDE], ids=["dense", "moe", "untied", "one"]
)
def test_pieces_cover_every_parameter_once(config):
    module = Transformer(config)
    marks = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    views = named_views(config, marks)
    for _, view in views:
        view += 1
    assert all(bool((mark == 1).all()) for mark in marks.values())
    assert sum(v.numel() for _, v in views) == config.parameter_counts().total
    assert len({name for name, _ in views}) == len(views)


def test_the_chapters_model_has_557_tensors():
    config = TransformerConfig(
        d_model=1024, n_layers=20, n_heads=16, n_kv_heads=4, d_ff=2816, moe_d_ff=512,
        moe_layers=tuple(range(5, 20)), max_seq_len=1024,
    )  # fmt: skip
    assert len(pieces(config)) == 557


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_gradients_agree_with_finite_differences(config):
    module = model(config).module.double()
    ids = random_ids(2, 7)
    targets, mask = ids.roll(-1, 1), torch.ones(2, 7, dtype=torch.bool)
    mask[:, -1] = False
    valid = torch.ones(2, 7, dtype=torch.bool)
    valid[1, 5:] = False

    def loss() -> torch.Tensor:
        loss_sum, count, auxiliary = module(ids, targets=targets, mask=mask, valid=valid)
        return loss_sum / count + auxiliary

    loss().backward()
    generator = torch.Generator().manual_seed(3)
    for name, p in module.named_parameters():
        direction = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        ends = []
        for sign in (1, -2, 1):  # up, down, and back
            with torch.no_grad():
                p += sign * 1e-6 * direction
                ends.append(float(loss()))
        numeric = (ends[0] - ends[1]) / 2e-6
        exact = float((p.grad * direction).sum())
        assert numeric == pytest.approx(exact, rel=1e-5, abs=1e-8), name


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_the_loss_is_that_of_the_logits(config):
    module = model(config).module
    b = batch(3, 9)
    targets, mask = b.targets()
    loss_sum, count, _ = module(b.ids, targets=targets, mask=mask)
    expected = torch.nn.functional.cross_entropy(
        module(b.ids)[mask], targets[mask], reduction="sum"
    )
    torch.testing.assert_close(loss_sum, expected)
    assert int(count) == 3 * 8


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_a_later_token_does_not_change_earlier_logits(config):
    module = model(config).module
    ids = random_ids(1, 12)
    changed = ids.clone()
    changed[0, 8] = (ids[0, 8] + 1) % config.vocab_size
    before, after = module(ids), module(changed)
    torch.testing.assert_close(after[:, :8], before[:, :8], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(after[:, 8:], before[:, 8:], atol=1e-3)


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_packed_documents_do_not_see_each_other(config):
    module = model(config).module
    first, second = random_ids(1, 5), random_ids(1, 7, seed=9)
    packed = module(
        torch.cat([first, second], dim=1),
        segments=torch.tensor([[0] * 5 + [1] * 7], dtype=torch.int32),
        positions=torch.tensor([[*range(5), *range(7)]], dtype=torch.int32),
    )
    apart = torch.cat([module(first), module(second)], dim=1)
    torch.testing.assert_close(packed, apart, rtol=1e-5, atol=1e-5)


def test_padding_changes_neither_logits_nor_auxiliary_loss():
    module = model(MOE).module
    ids = random_ids(1, 6)
    padded = torch.cat([ids, torch.zeros(1, 4, dtype=torch.int64)], dim=1)
    valid = torch.tensor([[True] * 6 + [False] * 4])
    targets = torch.zeros_like(padded)
    plain = module(ids, targets=targets[:, :6], mask=valid[:, :6])
    other = module(padded, targets=targets, mask=valid, valid=valid)
    torch.testing.assert_close(other[0], plain[0])
    torch.testing.assert_close(other[2], plain[2])


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_one_forward_uses_every_parameter(config):
    module = model(config).module
    b = batch(8, 20)
    targets, mask = b.targets()
    loss_sum, _, auxiliary = module(b.ids, targets=targets, mask=mask)
    (loss_sum + auxiliary).backward()
    for name, p in module.named_parameters():
        assert p.grad is not None, name
        assert bool(p.grad.any()), name


def test_mixed_precision_changes_the_loss_little_and_gradients_stay_fp32():
    lm = model(MOE)
    b = batch(4, 16)
    exact = float(lm.evaluate(b).lm_loss)
    lm.module.mixed_precision = True
    rounded = lm.accumulate_step(b)
    assert float(rounded.lm_loss) != exact
    assert float(rounded.lm_loss) == pytest.approx(exact, rel=2e-2)
    assert {p.grad.dtype for p in lm.module.parameters()} == {torch.float32}


def test_shadows_follow_whoever_writes_the_master():
    module = model(DENSE).module
    module.mixed_precision = True
    ids = random_ids(1, 6)
    module(ids)
    qkv = module.blocks[0].attention.qkv
    with torch.no_grad():
        qkv.weight.mul_(3)
    module(ids)
    assert torch.equal(qkv.shadow, qkv.weight.detach().bfloat16())
    state = {name: torch.ones_like(p) for name, p in module.named_parameters()}
    module.load_state_dict(state)
    module(ids)
    assert torch.equal(qkv.shadow, torch.ones_like(qkv.shadow))


class Secretive(torch.optim.Optimizer):
    """Writes through `.data`, as optimizers of old did."""

    def __init__(self, params, lr, fused):
        super().__init__(params, {"lr": lr})

    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data -= self.param_groups[0]["lr"] * p.grad.data


@pytest.mark.parametrize("own_steps", [0, 1])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, FusedAdam, Secretive])
def test_shadows_follow_an_optimizer_that_leaves_no_trace(optimizer, own_steps):
    lm = model(DENSE)
    lm.module.mixed_precision = True
    for _ in range(own_steps):
        lm.train_step_batch(batch(2, 9))
    foreign = optimizer(lm.module.parameters(), lr=0.1, fused=True)
    qkv = lm.module.blocks[0].attention.qkv
    for step in range(3):
        lm.accumulate_step(batch(2, 9, seed=step))
        lm.evaluate(batch(2, 9))
        assert torch.equal(qkv.shadow, qkv.weight.detach().bfloat16())
        foreign.step()
        foreign.zero_grad()
    lm.evaluate(batch(2, 9))
    assert torch.equal(qkv.shadow, qkv.weight.detach().bfloat16())


def test_shadows_follow_weights_that_are_exchanged():
    lm = model(DENSE)
    lm.module.mixed_precision = True
    lm.evaluate(batch(2, 9))
    other = model(DENSE).module
    with torch.no_grad():
        other.blocks[0].attention.qkv.weight.mul_(3)
    lm.module.load_state_dict(other.state_dict(), assign=True)
    lm.evaluate(batch(2, 9))
    qkv = lm.module.blocks[0].attention.qkv
    assert torch.equal(qkv.shadow, other.blocks[0].attention.qkv.weight.detach().bfloat16())


def test_fastbrains_own_optimizer_keeps_shadows_so_that_nothing_is_cast_again():
    lm = model(DENSE)
    lm.module.mixed_precision = True
    lm.train_step_batch(batch(2, 9))
    before = lm.module.blocks[0].attention.qkv.shadow
    lm.accumulate_step(batch(2, 9))
    lm.accumulate_step(batch(2, 9))
    assert lm.module.blocks[0].attention.qkv.shadow is before


def test_two_forwards_can_share_one_backward_in_mixed_precision():
    module = model(MOE).module
    module.mixed_precision = True
    b = batch(2, 9)
    targets, mask = b.targets()
    sums = [module(b.ids, targets=targets, mask=mask)[0] for _ in range(2)]
    (sums[0] + sums[1]).backward()
    assert module.embedding.weight.grad.isfinite().all()


def test_scoring_in_inference_mode_leaves_a_model_that_trains():
    lm = model(MOE)
    lm.module.mixed_precision = True
    with torch.inference_mode():
        lm.evaluate(batch(2, 9))
    lm.train_step_batch(batch(2, 9))


def test_autocast_does_not_reach_the_router():
    lm = model(MOE)
    exact = float(lm.evaluate(batch(2, 9)).auxiliary_loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert float(lm.evaluate(batch(2, 9)).auxiliary_loss) == pytest.approx(exact, rel=0.1)


def test_a_seed_gives_the_same_weights_again_and_another_seed_others():
    first, again, other = Transformer(MOE), Transformer(MOE), Transformer(MOE)
    initialize(first, 5)
    initialize(again, 5)
    initialize(other, 6)
    pairs = zip(first.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_what_the_module_cannot_use_is_refused_by_name():
    module, ids = Transformer(DENSE), random_ids(1, 4)
    with pytest.raises(ValueError, match="pass mask="):
        module(ids, targets=ids)
    with pytest.raises(ValueError, match="pass targets="):
        module(ids, mask=ids > 3)
    with pytest.raises(ValueError, match=r"ids must have 2 dimensions.*\(4,\)"):
        module(ids[0])
    with pytest.raises(SequenceTooLong, match="33 tokens"):
        module(random_ids(1, 33))
