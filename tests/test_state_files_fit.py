"""Tensors that are not the model's change no bit of it, though their manifest is right."""

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from made_runs import copied, relisted
from safetensors.torch import load_file, save_file
from torch import Tensor
from training_runs import checkpoint as checkpoint_path
from training_runs import entered, run

from fastbrain import TransformerLm
from fastbrain.errors import FastBrainError, InvalidSnapshot, Serde
from fastbrain.optim import Optimizer
from fastbrain.training import checkpoint, data, manifest
from fastbrain.training.run_dir import Checkpoint, RunDir
from fastbrain.training.settings import Settings

STEP = 6
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.norm.weight"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    with entered(tmp_path_factory.mktemp("runs")) as path:
        assert run("whole", "eval.samples=0") == 0
        yield path


@pytest.fixture
def restored(folder, tmp_path):
    """A way to restore a checkpoint whose file was changed, into a model that is then looked at."""
    opened = RunDir.open(folder / "whole")
    settings = Settings.from_tables(
        {key: value for key, value in opened.tables.items() if isinstance(value, dict)}
    )
    corpus = data.open_corpus(settings, folder / "whole" / "data")
    directory = copied(checkpoint_path(str(folder / "whole"), STEP), tmp_path / "step-00000006")
    model = TransformerLm(settings.config(61), Optimizer.adam(1e-2), seed=5)

    def restore(name: str, damage: Callable[[Path], object]) -> TransformerLm:
        damage(directory / name)
        relisted(directory)
        assert manifest.fault(directory, opened.run_id, STEP) is None
        before = bits(model)
        try:
            checkpoint.restore(Checkpoint(STEP, directory), model, corpus, settings, [])
        except FastBrainError:
            assert bits(model) == before
            raise
        return model

    return restore


def bits(model: TransformerLm) -> tuple[str, int]:
    digest = hashlib.sha256()
    for _, weight in model.weights():
        digest.update(weight.detach().numpy().tobytes())
    for _, first, second in model.moments():
        digest.update(first.numpy().tobytes() + second.numpy().tobytes())
    return digest.hexdigest(), int(model.optimizer_step())


def changed(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    """A change of the tensors in a file, written by the library."""

    def damage(path: Path) -> None:
        tensors = load_file(path)
        change(tensors)
        save_file({key: value.contiguous() for key, value in tensors.items()}, path)

    return damage


def renamed(prefix: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    return change


def twice(path: Path) -> None:
    """The same name a second time in the header, which the library would let pass."""
    content = path.read_bytes()
    [length] = struct.unpack_from("<Q", content)
    text = content[8 : 8 + length].rstrip()
    entry = json.loads(text)[NORM]
    text = text[:-1] + b"," + json.dumps({NORM: entry}).encode()[1:]
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def put(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: make(tensors[name])})


def more_layers(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".layers.1." in name]:
        tensors[name.replace(".1.", ".2.")] = tensors[name].clone()


# file, change, and what the message says
MISFITS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "turned": (
        MODEL,
        changed(put(DOWN, lambda t: t.T)),
        f"1 shapes differ: {DOWN} is (48, 32) in the file and (32, 48) in the model",
    ),
    "shorter": (
        MODEL,
        changed(put(DOWN, lambda t: t[:16])),
        f"1 shapes differ: {DOWN} is (16, 48) in the file and (32, 48) in the model",
    ),
    "norm of one row": (
        MODEL,
        changed(put(NORM, lambda t: t[None])),
        f"1 shapes differ: {NORM} is (1, 32) in the file and (32,) in the model",
    ),
    "half precision": (
        MODEL,
        changed(put(DOWN, lambda t: t.bfloat16())),
        f"1 dtypes differ: {DOWN} is BF16 in the file and F32 in the model",
    ),
    "double precision": (
        MODEL,
        changed(put(DOWN, lambda t: t.double())),
        f"1 dtypes differ: {DOWN} is F64 in the file and F32 in the model",
    ),
    "one missing": (
        MODEL,
        changed(lambda tensors: tensors.pop(DOWN)),
        f"the file lacks 1 of its tensors: {DOWN}",
    ),
    "one too many": (
        MODEL,
        changed(lambda tensors: tensors.update({"lm_head.weight": torch.zeros(61, 32)})),
        "the file has 1 tensors that the model lacks: lm_head.weight",
    ),
    "compiled": (
        MODEL,
        changed(renamed("_orig_mod.")),
        "the file lacks 20 of its tensors: model.embed_tokens.weight, "
        "model.layers.0.input_layernorm.weight, model.layers.0.self_attn.q_proj.weight, "
        "model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.v_proj.weight, "
        "and 15 more; the file has 20 tensors that the model lacks: _orig_mod.model.",
    ),
    "one more layer": (
        MODEL,
        changed(more_layers),
        "the file has 9 tensors that the model lacks: model.layers.2.",
    ),
    "a name twice": (MODEL, twice, f"its JSON has the key '{NORM}' twice in one object"),
    "a moment missing": (
        OPTIMIZER,
        changed(lambda tensors: tensors.pop(f"{DOWN}.moment2")),
        f"the file lacks 1 of its tensors: {DOWN}.moment2",
    ),
    "a moment of another shape": (
        OPTIMIZER,
        changed(put(f"{DOWN}.moment1", lambda t: t[:, :7])),
        f"1 shapes differ: {DOWN}.moment1 is (32, 7) in the file and (32, 48) in the model",
    ),
    "a moment in half precision": (
        OPTIMIZER,
        changed(put(f"{DOWN}.moment1", lambda t: t.half())),
        f"1 dtypes differ: {DOWN}.moment1 is F16 in the file and F32 in the model",
    ),
    "a counter of 32 bits": (
        OPTIMIZER,
        changed(put("updates", lambda t: t.int())),
        "1 dtypes differ: updates is I32 in the file and I64 in the model",
    ),
    "all moments in half precision": (
        OPTIMIZER,
        changed(
            lambda tensors: tensors.update({k: t.half() for k, t in tensors.items() if t.ndim})
        ),
        "40 dtypes differ: ",
    ),
}


def test_the_checkpoint_fits_as_it_is(restored):
    model = restored(MODEL, lambda _: None)
    assert int(model.optimizer_step()) == STEP


@pytest.mark.parametrize("kind", MISFITS)
def test_a_file_that_does_not_fit_changes_no_bit(restored, kind):
    name, damage, message = MISFITS[kind]
    with pytest.raises((InvalidSnapshot, Serde)) as caught:
        restored(name, damage)
    assert name in str(caught.value)
    assert message in str(caught.value)


def test_five_are_listed_and_the_rest_counted(restored):
    name, damage, _ = MISFITS["all moments in half precision"]
    with pytest.raises(InvalidSnapshot) as caught:
        restored(name, damage)
    said = str(caught.value).partition("40 dtypes differ: ")[2]
    assert said.count("is F16 in the file and F32 in the model") == 5
    assert said.endswith(", and 35 more")
