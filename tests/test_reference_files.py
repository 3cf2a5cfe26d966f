"""Files, to the byte: a seed gives the reference system's files, and a rewrite changes nothing."""

import numpy as np
import pytest
import torch
from fixture_models import LOSS, MODELS, Reference, assert_loss, assert_same_bits

from fastbrain import Precision, TransformerLm, atomic


@pytest.fixture(scope="module", params=MODELS)
def reference(request):
    return Reference(request.param)


@pytest.fixture(scope="module")
def written(reference, tmp_path_factory):
    """init.rbw and init_q8.rbw, as they follow from the seed."""
    folder = tmp_path_factory.mktemp(reference.name)
    model = reference.build()
    model.save_bin(folder / "init.rbw", Precision.F32)
    model.save_bin(folder / "init_q8.rbw", Precision.Q8)
    return folder


@pytest.mark.parametrize("file", ["init.rbw", "init_q8.rbw"])
def test_a_seed_gives_the_very_file(reference, written, file):
    assert atomic.sha256_of(written / file) == reference.digests[file]


@pytest.mark.parametrize(
    ("file", "precision"), [("init.rbw", Precision.F32), ("init_q8.rbw", Precision.Q8)]
)
def test_loaded_initial_weights_are_written_with_the_same_bytes(
    reference, written, tmp_path, file, precision
):
    TransformerLm.load_bin(written / "init.rbw").save_bin(tmp_path / file, precision)
    assert atomic.sha256_of(tmp_path / file) == reference.digests[file]


def test_a_q8_file_is_read_as_scale_times_level(written):
    model = TransformerLm.load_bin(written / "init_q8.rbw")
    expected = list(q8_values(written / "init_q8.rbw"))
    names = [name for name, _ in model.weights()]
    assert_same_bits(model.weights(), zip(names, expected, strict=True))


def test_a_q8_file_evaluates_as_it_did(reference, written):
    loss = TransformerLm.load_bin(written / "init_q8.rbw").evaluate(reference.batch("plain"))
    assert_loss(loss, reference.expected["q8"]["evaluate_plain"], LOSS)


def test_trained_files_are_written_with_the_same_bytes(reference, tmp_path):
    model = reference.trained(moments=True)
    model.save_bin(tmp_path / "trained.rbw", Precision.F32)
    model.save_optimizer_state(tmp_path / "trained.opt")
    for file in ("trained.rbw", "trained.opt"):
        assert (tmp_path / file).read_bytes() == (reference.folder / file).read_bytes(), file


def test_a_trained_file_restores_the_counter_and_the_rate(reference):
    expected = reference.expected["trained"]
    model = reference.trained(moments=False)
    assert model.optimizer_step() == expected["counter"]
    assert np.float32(model.learning_rate()) == np.float32(expected["learning_rate"])
    assert model.config == reference.config


def test_an_optimizer_file_restores_the_counter(reference):
    model = reference.build()
    model.load_optimizer_state(reference.folder / "trained.opt")
    assert model.optimizer_step() == reference.expected["trained"]["counter"]


def test_a_file_of_version_4_holds_the_same_model():
    reference = Reference("moe_shared")
    model = reference.trained(moments=False)
    by_4 = TransformerLm.load_bin(reference.folder / "trained_by_4.rbw")
    assert_same_bits(by_4.weights(), model.weights())
    assert by_4.config == model.config
    assert by_4.optimizer == model.optimizer
    assert by_4.optimizer_step() == model.optimizer_step()


def q8_values(path):
    """The tensors of a Q8 file, read with nothing but its layout."""
    data = path.read_bytes()
    at = 16 + int.from_bytes(data[8:16], "little")
    count = int.from_bytes(data[at : at + 8], "little")
    at += 8
    for _ in range(count):
        rows, cols = (int(n) for n in np.frombuffer(data, "<u8", 2, at))
        layout = np.dtype([("scale", "<f4"), ("level", "i1", (cols,))])
        row = np.frombuffer(data, layout, rows, at + 16)
        yield torch.from_numpy(row["level"].astype(np.float32) * row["scale"][:, None])
        at += 16 + rows * layout.itemsize
    assert at == len(data)
