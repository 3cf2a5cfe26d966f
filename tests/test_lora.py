"""Low-rank adapters: the reference system's own runs, and what makes them adapters."""

import re
import struct
from dataclasses import replace

import pytest
import torch
from fixture_models import CONTINUED_LOSS, FIXTURES, LOSS, NORM, Reference, read_json
from models import SHAPES, batch, model

from fastbrain import InvalidConfig, InvalidSnapshot, LoraConfig, Optimizer, TransformerLm, atomic
from fastbrain.transformer import pieces, split_parameters

BASES = {"lora_dense": "dense", "lora_moe_shared": "moe_shared"}


class Adapted:
    """One fixture of adapters, and the trained model that they were attached to."""

    def __init__(self, name: str) -> None:
        self.base = Reference(BASES[name])
        self.folder = FIXTURES / name
        self.expected = read_json(f"{name}/expected.json")
        self.digests = read_json("digests.json")[name]
        self.lora = LoraConfig(*(self.expected[key] for key in ("rank", "alpha", "seed")))
        self.plain = self.base.corpus.batch(1_000_000, 3, 20)

    def attached(self) -> TransformerLm:
        lm = self.base.trained(moments=False)
        lm.add_lora(self.lora)
        return lm

    def trained(self) -> TransformerLm:
        lm = TransformerLm.load_bin(self.folder / "with_adapter.rbw")
        lm.load_optimizer_state(self.folder / "with_adapter.opt")
        return lm

    def assert_evaluates(self, lm: TransformerLm, key: str, agreement: float) -> None:
        losses = lm.evaluate(self.plain)
        lm_loss, auxiliary = self.expected[key]
        assert abs(float(losses.lm_loss) - lm_loss) <= agreement
        assert abs(float(losses.auxiliary_loss) - auxiliary) <= agreement


@pytest.fixture(scope="module", params=BASES)
def adapted(request):
    return Adapted(request.param)


def test_a_seed_gives_the_very_adapters_and_they_change_nothing_yet(adapted, tmp_path):
    lm = adapted.attached()
    lm.save_lora(tmp_path / "init.rbl")
    assert atomic.sha256_of(tmp_path / "init.rbl") == adapted.digests["init.rbl"]
    adapted.assert_evaluates(lm, "evaluate_before", LOSS)
    assert split_parameters(lm.config)[0] == adapted.expected["trainable"]


def test_ten_steps_are_those_of_the_reference_system(adapted):
    lm = adapted.attached()
    lm.set_learning_rate(5e-3)
    for step, (lm_loss, auxiliary, norm) in enumerate(adapted.expected["rows"]):
        losses = lm.accumulate_step(adapted.base.corpus.batch(700 + step, 8, 24))
        assert abs(float(losses.lm_loss) - lm_loss) <= CONTINUED_LOSS
        assert abs(float(losses.auxiliary_loss) - auxiliary) <= CONTINUED_LOSS
        assert abs(float(lm.grad_norm()) - norm) <= NORM * norm
        if step == 0:
            # its counter comes from the file of the base, its moments are new
            with pytest.warns(UserWarning, match="step counter is 20 but its moments are zero"):
                lm.step(1.0)
        else:
            lm.step(1.0)
    assert lm.optimizer_step() == 30
    adapted.assert_evaluates(lm, "evaluate_after", CONTINUED_LOSS)


def test_files_with_adapters_are_written_with_the_same_bytes(adapted, tmp_path):
    lm = adapted.trained()
    assert lm.config.lora == adapted.lora
    lm.save_bin(tmp_path / "with_adapter.rbw")
    lm.save_optimizer_state(tmp_path / "with_adapter.opt")
    lm.save_lora(tmp_path / "trained.rbl")
    for name in ("with_adapter.rbw", "with_adapter.opt"):
        assert (tmp_path / name).read_bytes() == (adapted.folder / name).read_bytes()
    assert atomic.sha256_of(tmp_path / "trained.rbl") == adapted.digests["trained.rbl"]
    adapted.assert_evaluates(lm, "evaluate_after", LOSS)


def test_an_adapter_file_makes_of_the_base_what_was_trained(adapted, tmp_path):
    trained, lm = adapted.trained(), adapted.attached()
    trained.save_lora(tmp_path / "trained.rbl")
    lm.load_lora(tmp_path / "trained.rbl")
    for (name, ours), (_, theirs) in zip(lm.weights(), trained.weights(), strict=True):
        assert torch.equal(ours, theirs), name


def test_merged_weights_are_those_of_the_reference_system(adapted, tmp_path):
    lm = adapted.trained()
    lm.merge_lora()
    lm.save_bin(tmp_path / "merged.rbw")
    assert atomic.sha256_of(tmp_path / "merged.rbw") == adapted.digests["merged.rbw"]
    adapted.assert_evaluates(lm, "evaluate_merged", LOSS)


def test_adapters_that_are_saved_go_on_as_if_they_had_not_been(adapted, tmp_path):
    def go_on(lm: TransformerLm) -> list[bytes]:
        for step in range(3):
            lm.train_step_batch(adapted.base.corpus.batch(step, 4, 16))
        return [tensor.numpy().tobytes() for _, tensor in lm.weights()]

    lm = adapted.trained()
    lm.save_bin(tmp_path / "m.rbw")
    lm.save_optimizer_state(tmp_path / "m.opt")
    again = TransformerLm.load_bin(tmp_path / "m.rbw")
    again.load_optimizer_state(tmp_path / "m.opt")
    assert go_on(again) == go_on(lm)


@pytest.fixture(params=SHAPES)
def lm(request):
    return model(SHAPES[request.param], Optimizer.adam(1e-2))


def test_only_adapters_are_trained_and_the_loss_falls(lm):
    lm.add_lora(LoraConfig(2, alpha=4.0, seed=5))
    before = {name: tensor.clone() for name, tensor in lm.weights()}
    losses = [float(lm.train_step_batch(batch(4, 12)).lm_loss) for _ in range(8)]
    assert losses[-1] < losses[0]
    changed = {name for name, tensor in lm.weights() if not torch.equal(tensor, before[name])}
    adapters = {name for name in before if "lora_" in name}
    assert changed == adapters
    assert all(not first.numel() for name, first, _ in lm.moments() if name not in adapters)


def test_every_projection_has_an_adapter_behind_it_and_nothing_else_has(lm):
    lm.add_lora(LoraConfig(3))
    listed = pieces(lm.config)
    assert [name for name, _ in lm.weights()] == [each.name for each in listed]
    for base, down, up in zip(listed, listed[1:], listed[2:], strict=False):
        if base.name.endswith("_proj.weight"):
            stem = base.name.removesuffix("weight")
            assert (down.name, down.rows, down.cols) == (stem + "lora_A.weight", 3, base.cols)
            assert (up.name, up.rows, up.cols) == (stem + "lora_B.weight", base.rows, 3)
    assert sum("lora_" in each.name for each in listed) == 2 * sum(
        each.name.endswith("_proj.weight") for each in listed
    )


def test_an_adapter_adds_its_product_to_each_projection_by_name(lm):
    """What one (down, up) pair does to the whole model is what changing the weight itself does."""
    lm.add_lora(LoraConfig(2, alpha=3.0, seed=1))
    ids = batch(2, 9).ids
    names = [
        n.removesuffix("lora_B.weight") for n, _ in lm.weights() if n.endswith("lora_B.weight")
    ]
    plain = lm.module(ids)
    for stem in names:
        weights = dict(lm.weights())
        down, up, base = (
            weights[stem + end] for end in ("lora_A.weight", "lora_B.weight", "weight")
        )
        up.copy_(torch.linspace(-1, 1, up.numel()).view_as(up))
        adapted = lm.module(ids)
        delta = 1.5 * up @ down
        up.zero_()
        base += delta
        by_hand = lm.module(ids)
        base -= delta
        assert not torch.equal(by_hand, plain), stem
        assert (adapted - by_hand).abs().max() <= 1e-5 * by_hand.abs().max(), stem


def test_an_answer_follows_every_change_of_the_adapter(lm):
    """Decoding keeps the product of up and down from token to token, and no longer."""
    lm.add_lora(LoraConfig(2, alpha=8.0))
    for mixed in (False, True):
        lm._mixed_precision = mixed
        lm._set_precision()
        with torch.no_grad():
            first = lm.module(batch(2, 9).ids)
            assert torch.equal(lm.module(batch(2, 9).ids), first)
            for name, tensor in lm.adapters():
                tensor += 0.05 if name.endswith("lora_B.weight") else 0
            second = lm.module(batch(2, 9).ids)
        assert not torch.equal(first, second)
        assert torch.equal(lm.module(batch(2, 9).ids).detach(), second)


def test_a_merged_model_answers_alike_and_trains_whole(lm):
    lm.add_lora(LoraConfig(2, alpha=4.0))
    for _ in range(3):
        lm.train_step_batch(batch(4, 12))
    before = lm.module(batch(2, 9).ids).detach()
    lm.merge_lora()
    assert lm.config.lora is None
    after = lm.module(batch(2, 9).ids).detach()
    assert (before - after).abs().max() <= 1e-5 * before.abs().max()
    assert not any("lora_" in name for name, _ in lm.weights())
    held = {name: tensor.clone() for name, tensor in lm.weights()}
    with pytest.warns(UserWarning, match="its moments are zero"):
        lm.train_step_batch(batch(4, 12))
    assert all(not torch.equal(tensor, held[name]) for name, tensor in lm.weights())


def test_a_model_may_be_built_with_adapters():
    config = replace(SHAPES["dense"], lora=LoraConfig(2, seed=9))
    built = TransformerLm(config, seed=1)
    added = TransformerLm(SHAPES["dense"], seed=1)
    added.add_lora(LoraConfig(2, seed=9))
    for (name, ours), (_, theirs) in zip(built.weights(), added.weights(), strict=True):
        assert torch.equal(ours, theirs), name


def test_what_adapters_cannot_do_is_refused_with_the_way_out(lm, tmp_path):
    with pytest.raises(InvalidConfig, match="merge_lora needs a LoRA adapter; add_lora attaches"):
        lm.merge_lora()
    with pytest.raises(InvalidConfig, match="save_lora needs a LoRA adapter"):
        lm.save_lora(tmp_path / "x.rbl")
    lm.add_lora(LoraConfig(2))
    with pytest.raises(InvalidConfig, match="has a LoRA adapter already; merge_lora"):
        lm.add_lora(LoraConfig(2))
    with pytest.raises(InvalidConfig, match=r"call merge_lora\(\) first, and save_lora"):
        lm.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("other", [LoraConfig(3), LoraConfig(2, 5.0), LoraConfig(2, seed=1)])
def test_a_file_of_other_settings_is_refused_and_changes_nothing(tmp_path, other):
    source, target = model(SHAPES["moe"]), model(SHAPES["moe"])
    source.add_lora(LoraConfig(2))
    source.save_lora(tmp_path / "x.rbl")
    words = re.escape("rank 2, alpha 2, seed 0")
    with pytest.raises(InvalidSnapshot, match=r"call add_lora\(LoraConfig\(2, 2, 0\)\) first"):
        target.load_lora(tmp_path / "x.rbl")
    target.add_lora(other)
    before = [tensor.clone() for _, tensor in target.adapters()]
    with pytest.raises(InvalidSnapshot, match=f"an adapter of {words}, and this model has one of"):
        target.load_lora(tmp_path / "x.rbl")
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, target.adapters(), strict=True))


def test_a_damaged_adapter_file_is_refused_and_changes_nothing(tmp_path):
    lm, path = model(SHAPES["dense"]), tmp_path / "x.rbl"
    lm.add_lora(LoraConfig(2))
    lm.save_lora(path)
    whole = path.read_bytes()
    before = [tensor.clone() for _, tensor in lm.adapters()]
    count = whole.index(b"}") + 1
    damages = {
        "begins with b'RBWTS001'": b"RBWTS001" + whole[8:],
        "is cut short": whole[:-1],
        "holds 5 tensors, but this model implies 28": whole[:count]
        + struct.pack("<Q", 5)
        + whole[count + 8 :],
        "is 2 x 25, but this model implies 2 x 24": whole[: count + 16]
        + struct.pack("<Q", 25)
        + whole[count + 24 :],
        "in its header": whole.replace(b'"rank":2', b'"rank":x'),
        "lora lacks the key seed": whole.replace(b'"seed"', b'"sled"'),
        "more than the 65536 allowed": whole[:8] + struct.pack("<Q", 2**40) + whole[16:],
    }
    for reason, data in damages.items():
        path.write_bytes(data)
        with pytest.raises(Exception, match=re.escape(reason)) as caught:
            lm.load_lora(path)
        assert type(caught.value).__module__ == "fastbrain.errors", reason
        assert all(torch.equal(a, b) for a, (_, b) in zip(before, lm.adapters(), strict=True))


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_adapters_that_are_no_numbers_are_refused_and_change_nothing(tmp_path, number):
    lm, path = model(SHAPES["dense"]), tmp_path / "x.rbl"
    lm.add_lora(LoraConfig(2))
    name, last = lm.adapters()[-1]
    kept = last[-1, -1].item()
    last[-1, -1] = number
    lm.save_lora(path)
    last[-1, -1] = kept
    for _, tensor in lm.adapters():
        tensor += 1
    before = [tensor.clone() for _, tensor in lm.adapters()]
    with pytest.raises(InvalidSnapshot, match=f"{re.escape(name)} has values that are not finite"):
        lm.load_lora(path)
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, lm.adapters(), strict=True))
