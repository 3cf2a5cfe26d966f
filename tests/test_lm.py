"""The object a user holds: losses, evaluation, precision, devices, files, and what they refuse."""

import math

import pytest
import torch
from models import DENSE, MOE, SHAPES, batch, model, ragged, random_ids

import fastbrain
from fastbrain import (
    CudaMemoryBudget,
    InvalidConfig,
    InvalidDataset,
    Optimizer,
    Precision,
    SequenceTooLong,
    TokenBatch,
    TokenFile,
    TokenOutOfRange,
    TransformerLm,
    UnsupportedCuda,
)


def state(lm):
    tensors = [w for _, w in lm.weights()] + [m for _, *pair in lm.moments() for m in pair]
    return [t.clone() for t in tensors]


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture
def held_out(tmp_path):
    TokenFile.write(tmp_path / "held.bin", random_ids(250).numpy())
    return TokenFile.open(tmp_path / "held.bin", 0)


def test_every_public_name_is_there():
    for name in fastbrain.__all__:
        assert getattr(fastbrain, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Transformer'"):
        _ = fastbrain.Transformer


def test_the_builder_of_the_chapter_gives_its_counts():
    builder = (
        TransformerLm.builder().vocab_size(32_000).d_model(1024).n_layers(20).heads(16, 4, 64)
        .d_ff(2816).moe_d_ff(512).experts(8, 2).moe_layers(range(5, 20)).shared_expert(True)
        .max_seq_len(1024).optimizer(Optimizer.adam(3e-4)).seed(42)
    )  # fmt: skip
    counts = builder.parameter_counts()
    assert (counts.total, counts.active) == (340_952_064, 199_394_304)
    assert str(counts) == "341.0M total / 199.4M active (1.71x)"
    assert TransformerLm.builder().parameter_counts() == (55_181_824, 35_717_632)


def test_the_builder_passes_everything_on():
    lm = (
        TransformerLm.builder().config(MOE).d_ff(40).optimizer(Optimizer.lion(1e-4)).seed(3)
        .rope_base(5e4).rmsnorm_eps(1e-5).tie_embeddings(False).aux_loss_weight(0.5)
        .router_z_loss_weight(0.25).rope_scaling(fastbrain.LinearScaling(2.0)).build()
    )  # fmt: skip
    c = lm.config
    assert (c.d_ff, c.rope_base, c.rmsnorm_eps, c.tie_embeddings) == (40, 5e4, 1e-5, False)
    assert (c.aux_loss_weight, c.router_z_loss_weight) == (0.5, 0.25)
    assert c.rope_scaling == fastbrain.LinearScaling(2.0)
    assert lm.optimizer == Optimizer.lion(1e-4)
    again = TransformerLm(c, Optimizer.lion(1e-4), seed=3)
    assert equal(state(lm), state(again))


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_losses_are_a_sum_a_count_and_what_follows(config):
    lm = model(config)
    losses = lm.evaluate(ragged([3, 9, 5]))
    assert int(losses.predicted) == 2 + 8 + 4
    assert float(losses.lm_loss) == pytest.approx(float(losses.lm_loss_sum) / 14, rel=1e-6)
    total = float(losses.lm_loss) + float(losses.auxiliary_loss)
    assert float(losses.total()) == pytest.approx(total)
    assert float(losses.perplexity()) == pytest.approx(math.exp(losses.lm_loss), rel=1e-5)
    assert f"{losses.lm_loss:.4f}" == f"{float(losses.lm_loss):.4f}"
    assert losses.lm_loss < 100
    assert (float(losses.auxiliary_loss) > 0) == (config is MOE)


def test_train_step_returns_the_loss_before_the_update_and_lowers_it():
    lm = model(DENSE, Optimizer.adam(1e-2))
    b = batch(4, 12)
    before = float(lm.evaluate(b).lm_loss)
    assert float(lm.train_step_batch(b).lm_loss) == before
    for _ in range(10):
        last = lm.train_step(b.ids.tolist())
    assert float(last.lm_loss) < 0.8 * before


def test_evaluation_changes_nothing():
    lm, plain = model(MOE), model(MOE)
    for step in range(3):
        plain.train_step_batch(batch(2, 9, seed=step))
        lm.evaluate(batch(2, 9, seed=7))
        lm.accumulate_step(batch(2, 9, seed=step))
        lm.evaluate(batch(2, 9, seed=8))
        lm.step(1.0)
    assert equal(state(lm), state(plain))


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_file_evaluation_does_not_depend_on_the_batch_size(config, held_out):
    lm = model(config)
    losses = [lm.evaluate_file(held_out, n, 16) for n in (1, 7, 8, 100)]
    for other in losses[1:]:
        assert int(other.predicted) == int(losses[0].predicted) == 15 * 15
        assert float(other.lm_loss) == pytest.approx(float(losses[0].lm_loss), rel=1e-6)


def test_file_evaluation_of_too_little_text_is_refused(held_out):
    lm = model(DENSE)
    assert int(lm.evaluate_file(held_out, 8, 32).predicted) == 7 * 31
    with pytest.raises(InvalidDataset, match=r"250 tokens.*window of 251"):
        model(DENSE).evaluate_file(held_out, 1, 251)


def test_ids_and_lengths_are_refused_before_anything_changes():
    lm = model(DENSE)
    lm.accumulate_step(batch(2, 9))
    grads = [p.grad.clone() for p in lm.module.parameters()]
    with pytest.raises(
        TokenOutOfRange, match=r"token id 37 .*vocabulary of 37 \(ids 0 to 36\)"
    ) as e:
        lm.train_step([[1, 2, 37]])
    assert (e.value.id, e.value.vocab) == (37, 37)
    with pytest.raises(SequenceTooLong, match=r"33 tokens is longer.*max_seq_len of 32") as e:
        lm.accumulate_step(TokenBatch([list(range(33))]))
    assert (e.value.length, e.value.max) == (33, 32)
    assert all(torch.equal(g, p.grad) for g, p in zip(grads, lm.module.parameters(), strict=True))


def test_mixed_precision_warns_where_it_is_slower_and_comes_off_again(monkeypatch):
    monkeypatch.setattr("fastbrain.stored_model.has_fast_bf16", lambda device: False)
    lm = model(MOE)
    b = batch(2, 9)
    plain = lm.evaluate(b)
    with pytest.warns(UserWarning, match="no BF16 instructions"):
        lm.set_mixed_precision(True)
    assert float(lm.evaluate(b).lm_loss) != float(plain.lm_loss)
    lm.set_mixed_precision(False)
    assert float(lm.evaluate(b).lm_loss) == float(plain.lm_loss)
    monkeypatch.setattr("fastbrain.stored_model.has_fast_bf16", lambda device: True)
    assert (
        TransformerLm.builder().config(DENSE).mixed_precision(True).build().module.mixed_precision
    )


class FakeCuda:
    """Stands in for a device: what `to_cuda` asks before it allocates."""

    def __init__(self, monkeypatch, capability=(8, 6)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def test_no_cuda_device_is_the_first_thing_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedCuda, match="no CUDA device 0 here"):
        model(DENSE).to_cuda(0, 1)
    FakeCuda(monkeypatch)
    with pytest.raises(UnsupportedCuda, match="no CUDA device 3 here"):
        model(DENSE).to_cuda(3)


def test_an_old_device_is_refused_by_its_capability(monkeypatch):
    FakeCuda(monkeypatch, capability=(7, 5))
    with pytest.raises(UnsupportedCuda, match=r"capability 7\.5.*8\.0"):
        model(DENSE).to_cuda(0)


def test_the_budget_is_held_against_16_bytes_a_parameter(monkeypatch):
    FakeCuda(monkeypatch)
    lm = TransformerLm.__new__(TransformerLm)  # 55M parameters need not exist to be counted
    lm.config = fastbrain.TransformerConfig()
    with pytest.raises(CudaMemoryBudget, match=r"843 MiB.*budget of 842 MiB") as e:
        lm.to_cuda(0, 842)
    assert (e.value.estimate_mib, e.value.budget_mib) == (843, 842)
    with pytest.raises(InvalidConfig, match="budget_mib must be at least 0"):
        lm.to_cuda(0, -1)


def test_running_out_of_device_memory_names_the_remedies_in_order(monkeypatch):
    lm = model(DENSE)

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(lm.module, "forward", fail)
    with pytest.raises(fastbrain.Cuda) as e:
        lm.accumulate_step(batch(2, 9))
    message = str(e.value)
    order = ["micro-batch", "mixed precision", "shorter", "key-value", "experts", "layers"]
    places = [message.index(word) for word in order]
    assert places == sorted(places)
    assert "2 GiB" in message


def test_a_cpu_model_moves_to_the_cpu_and_syncs_without_effect():
    lm = model(DENSE)
    lm.train_step_batch(batch(2, 9))
    before = state(lm)
    lm.to_cpu()
    lm.sync_from_device()
    assert not lm.on_device()
    assert equal(before, state(lm))


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_weights_and_state_come_back_from_files(config, tmp_path):
    lm = model(config, Optimizer.adam(1e-3, betas=(0.8, 0.95), weight_decay=0.125))
    for step in range(3):
        lm.train_step_batch(batch(2, 9, seed=step))
    lm.save_bin(tmp_path / "a.rbw", Precision.F32)
    lm.save_optimizer_state(tmp_path / "a.opt")
    again = TransformerLm.load_bin(tmp_path / "a.rbw")
    again.load_optimizer_state(tmp_path / "a.opt")
    assert (again.config, again.optimizer, again.optimizer_step()) == (config, lm.optimizer, 3)
    assert equal(state(lm), state(again))


def test_training_on_from_weights_alone_warns_once(tmp_path):
    lm = model(DENSE)
    lm.train_step_batch(batch(2, 9))
    lm.save_bin(tmp_path / "a.rbw")
    again = TransformerLm.load_bin(tmp_path / "a.rbw")
    with pytest.warns(UserWarning, match="moments are zero"):
        again.train_step_batch(batch(2, 9))
    again.train_step_batch(batch(2, 9))


def test_training_on_from_a_q8_file_warns_and_names_it(tmp_path):
    lm = model(DENSE)
    lm.save_bin(tmp_path / "small.rbw", Precision.Q8)
    again = TransformerLm.load_bin(tmp_path / "small.rbw")
    difference = [float((a - b).abs().max()) for a, b in zip(state(lm), state(again), strict=True)]
    assert 0 < max(difference) < 0.02
    with pytest.warns(UserWarning, match=r"small\.rbw.*rounded to 8 bits"):
        again.train_step_batch(batch(2, 9))


def test_state_of_another_step_warns_and_names_both(tmp_path):
    lm = model(DENSE)
    lm.train_step_batch(batch(2, 9))
    lm.save_bin(tmp_path / "a.rbw")
    lm.train_step_batch(batch(2, 9))
    lm.save_optimizer_state(tmp_path / "b.opt")
    again = TransformerLm.load_bin(tmp_path / "a.rbw")
    with pytest.warns(UserWarning, match="state of step 2, but these weights are of step 1"):
        again.load_optimizer_state(tmp_path / "b.opt")
    assert again.optimizer_step() == 2


def test_two_models_do_not_share_the_optimizer_they_were_given():
    rule = Optimizer.adam(1e-3)
    first, second = model(DENSE, rule), model(DENSE, rule)
    first.set_learning_rate(5.0)
    assert second.learning_rate() == rule.learning_rate == 1e-3


REFUSED = {
    "optimizer must be of Optimizer": lambda: TransformerLm(DENSE, "adam"),
    "seed is 1.5": lambda: TransformerLm(DENSE, seed=1.5),
    "seed is -1": lambda: TransformerLm(DENSE, seed=-1),
    r"must be a TokenBatch\(sequences\), got list": lambda: model(DENSE).evaluate([[1, 2]]),
    "counter must be a whole number": lambda: model(DENSE).set_optimizer_step(2**64),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_of_the_wrong_kind_is_refused_by_name(message):
    with pytest.raises(InvalidConfig, match=message):
        REFUSED[message]()


def test_supervised_training_learns_the_answer_and_not_the_prompt():
    lm = model(DENSE, Optimizer.adam(1e-2))
    pairs = [([1, 2, 3], [4, 5, 0]), ([7, 8], [9, 0])]
    b = TokenBatch.supervised(pairs)
    for _ in range(60):
        lm.train_step_batch(b)
    for prompt, response in pairs:
        assert lm.generate(prompt, 8, fastbrain.Sampler.greedy(), stop=(0,)) == response
