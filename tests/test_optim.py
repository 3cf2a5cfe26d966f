"""Updates: the rules written out, accumulation, clipping, the counter, and refusals."""

import copy
from dataclasses import replace

import pytest
import torch
from models import DENSE, MOE, SHAPES, batch, model, ragged

from fastbrain import InvalidConfig, Optimizer, TokenBatch


def weights(lm):
    return {name: p.detach().clone() for name, p in lm.module.named_parameters()}


def largest_difference(first, second):
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def gradients(lm):
    return {name: p.grad.clone() for name, p in lm.module.named_parameters()}


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_is_torch_adamw_over_30_steps(decay):
    lm = model(DENSE, Optimizer.adam(1e-3, weight_decay=decay))
    other = copy.deepcopy(lm.module)
    adamw = torch.optim.AdamW(
        other.parameters(), lr=1e-3, eps=1e-8, weight_decay=decay, fused=False
    )
    for step in range(30):
        b = batch(4, 12, seed=step)
        lm.train_step_batch(b)
        targets, mask = b.targets()
        adamw.zero_grad()
        loss_sum, count, _ = other(b.ids, targets=targets, mask=mask)
        (loss_sum / count).backward()
        adamw.step()
    for ours, theirs in zip(lm.module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_sgd_is_its_formula():
    lm = model(DENSE, Optimizer.sgd(0.5))
    lm.accumulate_step(batch(2, 9))
    before, grads = weights(lm), gradients(lm)
    lm.step(0.25)
    for name, w in weights(lm).items():
        torch.testing.assert_close(w, before[name] - 0.5 * 0.25 * grads[name])
    assert lm.optimizer_step() == 1


def test_lion_is_its_formula_over_three_steps():
    lm = model(DENSE, Optimizer.lion(1e-3, betas=(0.9, 0.98), weight_decay=0.1))
    m = {name: torch.zeros_like(p) for name, p in lm.module.named_parameters()}
    for step in range(3):
        lm.accumulate_step(batch(2, 9, seed=step))
        w, g = weights(lm), gradients(lm)
        lm.step(1.0)
        for name, after in weights(lm).items():
            direction = (0.9 * m[name] + 0.1 * g[name]).sign()
            torch.testing.assert_close(after, w[name] - 1e-3 * (direction + 0.1 * w[name]))
            m[name] = 0.98 * m[name] + 0.02 * g[name]
    first, second = zip(*[(a, b) for _, a, b in lm.moments()], strict=True)
    assert any(bool(a.any()) for a in first)
    assert not any(bool(b.any()) for b in second)


@pytest.mark.parametrize("decay_vectors", [True, False])
def test_decay_spares_one_row_tensors_only_when_told(decay_vectors):
    config = replace(MOE, num_experts=1, experts_per_token=1)
    rule = Optimizer.adam(1e-2, weight_decay=0.5, decay_vectors=decay_vectors)
    lm = model(config, rule)
    before = weights(lm)
    for p in lm.module.parameters():
        p.grad = torch.zeros_like(p)
    lm.step(1.0)
    shrunk = {n for n, w in weights(lm).items() if not torch.equal(w, before[n])}
    vectors = {n for n in before if "norm" in n or n.endswith("router")}
    assert shrunk == (set(before) if decay_vectors else set(before) - vectors)


def test_four_micro_batches_of_4_are_one_batch_of_16():
    whole, parts = model(DENSE), model(DENSE)
    b = batch(16, 12)
    whole.accumulate_step(b)
    for i in range(4):
        parts.accumulate_step(b.slice(4 * i, 4 * i + 4), weight=0.25)
    exact = gradients(whole)
    top = max(float(g.abs().max()) for g in exact.values())
    assert largest_difference(exact, gradients(parts)) < 1e-5 * top


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_weights_make_ragged_accumulation_exact(config):
    config = replace(config, aux_loss_weight=0.0, router_z_loss_weight=0.0)
    whole, parts = model(config), model(config)
    lengths = [2, 17, 5, 30, 9, 3, 24, 11]
    sequences = [s[: int(n)] for s, n in zip(*_rows(ragged(lengths)), strict=True)]
    b = TokenBatch(sequences)
    whole.accumulate_step(b)
    for i in range(0, 8, 2):
        part = TokenBatch(sequences[i : i + 2])
        parts.accumulate_step(part, weight=part.predicted() / b.predicted())
    exact = gradients(whole)
    top = max(float(g.abs().max()) for g in exact.values())
    assert largest_difference(exact, gradients(parts)) < 1e-5 * top


def _rows(b):
    return b.ids.tolist(), b.lengths.tolist()


def test_auxiliary_weight_weighs_the_auxiliary_loss_alone():
    plain, off = model(MOE), model(replace(MOE, aux_loss_weight=0.0, router_z_loss_weight=0.0))
    plain.accumulate_step(batch(2, 9), auxiliary_weight=0.0)
    off.accumulate_step(batch(2, 9))
    assert largest_difference(gradients(plain), gradients(off)) < 1e-7


def test_step_clears_gradients_and_repeating_it_moves_on_moments_alone():
    lm = model(DENSE)
    lm.train_step_batch(batch(2, 9))
    assert all(p.grad is None for p in lm.module.parameters())
    before = weights(lm)
    lm.step(1.0)
    assert largest_difference(before, weights(lm)) > 0
    assert lm.optimizer_step() == 2


def test_clipping_compares_the_norm_of_the_scaled_gradient():
    clipped, plain = (model(DENSE, Optimizer.sgd(1.0)) for _ in range(2))
    for lm in (clipped, plain):
        lm.accumulate_step(batch(2, 9))
    raw = float(plain.grad_norm())
    norm = clipped.step_clipped(0.5, raw / 4)
    assert float(norm) == pytest.approx(raw / 2, rel=1e-6)
    plain.step(0.25)
    assert largest_difference(weights(clipped), weights(plain)) < 1e-7


def test_a_norm_below_the_threshold_clips_nothing():
    clipped, plain = model(DENSE), model(DENSE)
    for lm in (clipped, plain):
        lm.accumulate_step(batch(2, 9))
    clipped.step_clipped(1.0, 1e9)
    plain.step(1.0)
    assert largest_difference(weights(clipped), weights(plain)) == 0


@pytest.mark.parametrize("rule", [Optimizer.adam(0.1), Optimizer.sgd(0.1), Optimizer.lion(0.1)])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_changes_nothing(rule, poison):
    lm = model(DENSE, copy.copy(rule))
    lm.train_step_batch(batch(2, 9))
    before = weights(lm), [m.clone() for _, *pair in lm.moments() for m in pair]
    lm.accumulate_step(batch(2, 9))
    next(lm.module.parameters()).grad[0, 0] = poison
    assert not bool(lm.step_clipped(1.0, 1.0).isfinite())
    assert largest_difference(before[0], weights(lm)) == 0
    moments = [m for _, *pair in lm.moments() for m in pair]
    assert all(torch.equal(a, b) for a, b in zip(before[1], moments, strict=True))
    assert lm.optimizer_step() == 1
    assert all(p.grad is None for p in lm.module.parameters())


def test_losses_norms_and_counter_stay_on_the_device():
    lm = model(MOE)
    losses = lm.accumulate_step(batch(2, 9))
    norm = lm.step_clipped(1.0, 1.0)
    for scalar in (losses.lm_loss, losses.auxiliary_loss, losses.lm_loss_sum, norm):
        assert (scalar.shape, scalar.dtype, scalar.requires_grad) == ((), torch.float32, False)
    assert losses.predicted.dtype == torch.int64


def test_a_rate_or_rule_swapped_between_steps_is_the_one_used():
    lm = model(DENSE)
    lm.train_step_batch(batch(2, 9))
    before = weights(lm)
    lm.optimizer.set_learning_rate(0.0)
    lm.train_step_batch(batch(2, 9))
    assert largest_difference(before, weights(lm)) == 0
    lm.optimizer = Optimizer.sgd(0.1)
    lm.train_step_batch(batch(2, 9))
    assert largest_difference(before, weights(lm)) > 0


def test_adam_refreshes_the_shadows_it_updates():
    lm = model(MOE)
    lm.module.mixed_precision = True
    lm.train_step_batch(batch(2, 9))
    shadows = [m for m in lm.module.modules() if getattr(m, "shadow", None) is not None]
    assert len(shadows) > 4
    assert all(torch.equal(w.shadow, w.weight.detach().bfloat16()) for w in shadows)


def test_a_skipped_update_does_not_make_a_stale_shadow_pass_for_fresh():
    lm = model(DENSE)
    lm.module.mixed_precision = True
    lm.accumulate_step(batch(2, 9))
    embedding = lm.module.embedding
    with torch.no_grad():
        embedding.weight.mul_(2)  # after the forward that made the shadow
    embedding.weight.grad[0, 0] = float("nan")
    lm.step_clipped(1.0, 1.0)
    lm.evaluate(batch(2, 9))
    assert torch.equal(embedding.shadow, embedding.weight.detach().bfloat16())


def test_setting_the_counter_without_moments_warns_and_names_the_way_out():
    lm = model(DENSE)
    with pytest.warns(UserWarning, match=r"6\.6 times.*set_optimizer_step\(0\)"):
        lm.set_optimizer_step(48_000)
    assert lm.optimizer_step() == 48_000
    lm.train_step_batch(batch(2, 9))  # warned of once is enough
    lm.set_optimizer_step(7)  # moments are there now


REFUSED = {
    "learning_rate must be": lambda: Optimizer.adam(-1e-3),
    "learning_rate must be a finite": lambda: Optimizer.sgd(float("nan")),
    "betas must be": lambda: Optimizer.adam(1e-3, betas=(0.9, 1.0)),
    "betas must be two": lambda: Optimizer.lion(1e-3, betas=(0.9,)),
    "eps must be": lambda: Optimizer.adam(1e-3, eps=-1.0),
    "weight_decay must be": lambda: Optimizer.lion(1e-3, weight_decay=float("inf")),
    "max_norm must be": lambda: model(DENSE).step_clipped(1.0, -1.0),
    "^weight must be": lambda: model(DENSE).accumulate_step(batch(2, 9), weight=float("nan")),
    "auxiliary_weight must": lambda: model(DENSE).accumulate_step(
        batch(2, 9), auxiliary_weight=float("inf")
    ),
    "scale must be": lambda: model(DENSE).step(float("nan")),
    "counter must be": lambda: model(DENSE).set_optimizer_step(-1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_settings_are_refused_by_name(message):
    with pytest.raises(InvalidConfig, match=message):
        REFUSED[message]()
