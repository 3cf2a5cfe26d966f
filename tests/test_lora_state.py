"""Adapters and what a model keeps for them: products, gradients, moments, decay, files."""

import io
import os
import weakref
from collections.abc import Callable
from errno import EIO

import pytest
import torch
from models import SHAPES, batch, model

from fastbrain import LoraConfig, Optimizer, TransformerLm
from fastbrain.errors import Io, Serde
from fastbrain.formats import binary, rbl
from fastbrain.formats.header import lora_from_object
from fastbrain.layers import Linear


@pytest.fixture(params=SHAPES)
def lm(request):
    return model(SHAPES[request.param], Optimizer.adam(1e-2))


def adapted_linear() -> Linear:
    """A projection whose adapter changes it."""
    linear = Linear(8, 6)
    linear.adapt([2, 4], LoraConfig(2))
    for parameter in linear.parameters():
        torch.nn.init.normal_(parameter)
    return linear


WRITERS: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "in place": lambda p: p.mul_(2),
    "by another tensor": lambda p: setattr(p, "data", 2 * p.data),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("name", ["weight", "adapter.down", "adapter.up"])
@torch.no_grad()
def test_a_kept_product_is_made_anew_once_a_part_of_it_was_written(name, write, dtype):
    linear, x = adapted_linear(), torch.eye(8, dtype=dtype)
    first = linear(x)
    assert linear.operands(dtype)[0] is linear.operands(dtype)[0]
    write(dict(linear.named_parameters())[name])
    second = linear(x)
    assert not torch.equal(first, second)
    assert torch.equal(second, linear.adapter.fold(linear.weight).to(dtype).T)


@pytest.mark.parametrize("let_go", [Linear.merge, Linear.drop_shadow], ids=["merge", "drop"])
@torch.no_grad()
def test_a_kept_product_that_is_not_asked_for_again_takes_no_memory(let_go):
    linear = adapted_linear()
    kept = [weakref.ref(each) for each in linear.operands(torch.bfloat16)]
    assert all(each() is not None for each in kept)
    let_go(linear)
    assert [each() for each in kept] == [None, None]


def decayed(lm: TransformerLm) -> set[str]:
    """The tensors that an update without gradients shrinks."""
    before = {name: tensor.clone() for name, tensor in lm.weights()}
    lm.step(1.0)
    return {name for name, tensor in lm.weights() if not torch.equal(tensor, before[name])}


@pytest.mark.filterwarnings("ignore:.*its moments are zero")
@pytest.mark.parametrize("shape", SHAPES)
def test_weight_decay_spares_norms_alone_with_adapters_and_without(shape):
    optimizer = Optimizer.adam(0.1, weight_decay=0.5, decay_vectors=False)
    lm = model(SHAPES[shape], optimizer)
    matrices = {name for name, _ in lm.weights() if not name.endswith("norm.weight")}
    assert decayed(lm) == matrices
    lm.add_lora(LoraConfig(2))
    for _, tensor in lm.adapters():
        tensor += 1
    assert decayed(lm) == {name for name, _ in lm.adapters()}
    lm.merge_lora()
    assert decayed(lm) == matrices


def test_gradients_of_what_was_trained_before_do_not_count(lm):
    lm.accumulate_step(batch(4, 12))
    lm.add_lora(LoraConfig(2))
    assert float(lm.grad_norm()) == 0
    assert not any(bool(gradient.any()) for _, gradient in lm.gradients())
    lm.accumulate_step(batch(4, 12))
    assert float(lm.grad_norm()) > 0
    lm.merge_lora()
    assert float(lm.grad_norm()) == 0


def test_moments_that_are_zero_in_their_file_belong_to_its_counter(lm, tmp_path):
    lm.set_learning_rate(1e-3)
    with pytest.warns(UserWarning, match="its moments are zero"):
        lm.set_optimizer_step(5)
    lm.save_optimizer_state(tmp_path / "zero.opt")
    lm.load_optimizer_state(tmp_path / "zero.opt")
    # a warning is an error here
    lm.train_step_batch(batch(2, 8))
    assert lm.optimizer_step() == 6


# files


def test_a_disk_that_fails_in_the_middle_changes_nothing(tmp_path, monkeypatch):
    path, lora = tmp_path / "x.rbl", LoraConfig(2)
    rbl.write(path, lora, [(name, torch.ones(64, 1024)) for name in "ab"])
    bad = path.stat().st_size - 64 * 1024

    class Failing(io.FileIO):
        """A sector of the second matrix cannot be read."""

        def readinto(self, target):
            if self.tell() <= bad < self.tell() + len(target):
                raise OSError(EIO, os.strerror(EIO))
            return super().readinto(target)

    adapters = [(name, torch.zeros(64, 1024)) for name in "ab"]
    with monkeypatch.context() as patch:
        patch.setattr(binary.io, "FileIO", Failing)
        with pytest.raises(Io, match=r"cannot read .*: Input/output error"):
            rbl.read(path, lora, adapters)
    assert not any(bool(tensor.any()) for _, tensor in adapters)
    rbl.read(path, lora, adapters)
    assert all(bool(tensor.all()) for _, tensor in adapters)


@pytest.mark.parametrize("seed", ["3", 3.0, -1, 2**63, True, None])
def test_a_seed_is_a_whole_number_in_a_file(seed):
    with pytest.raises(Serde, match=r"^lora.seed must be a whole number below 2\^63, such as 128"):
        lora_from_object({"rank": 2, "alpha": 4.0, "seed": seed})
    assert lora_from_object({"rank": 2, "alpha": 4.0, "seed": 3}) == LoraConfig(2, 4.0, 3)
