"""Any model is opened by its path: what is damaged is refused, and nothing is renamed."""

import json
import shutil
from pathlib import Path

import pytest
from fixture_models import FIXTURES
from small_models import saved
from texts import small_tokenizer
from training_runs import checkpoint, entered, run

from fastbrain import TransformerLm
from fastbrain.errors import FastBrainError, InvalidConfig, InvalidSnapshot, Io
from fastbrain.training.pretrained import open_pretrained
from fastbrain.training.run_dir import NoCheckpoint, RunDir


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("pretrained")) as folder:
        assert run("run", "eval.samples=0") == 0
        yield folder


@pytest.fixture
def copied(tmp_path) -> Path:
    """The run again, to be damaged."""
    return Path(shutil.copytree("run", tmp_path / "run"))


def flip(path: Path, at: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def weights(found) -> list[bytes]:
    return [tensor.numpy().tobytes() for _, tensor in found.model.weights()]


def test_a_run_is_its_newest_checkpoint_or_the_one_of_a_step():
    newest, earlier = open_pretrained("run"), open_pretrained("run", step=3)
    assert newest.source == f"checkpoint {checkpoint('run', 6)}"
    assert earlier.source == f"checkpoint {checkpoint('run', 3)}"
    assert weights(newest) == weights(open_pretrained(checkpoint("run", 6)))
    assert weights(earlier) == weights(open_pretrained(checkpoint("run", 3)))
    assert weights(newest) != weights(earlier)
    assert newest.files is None


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "config.json", "MANIFEST.json"]
)
def test_a_damaged_checkpoint_is_refused_by_its_own_path(copied, name):
    path = copied / "checkpoints" / "step-00000006"
    before = names(copied)
    flip(path / name)
    with pytest.raises(FastBrainError) as caught:
        open_pretrained(path)
    said = str(caught.value)
    if name != "MANIFEST.json":
        assert said == (
            f"{path} is damaged: {name} was changed after it was written; use another checkpoint "
            "of its run"
        )
    assert name in said
    assert names(copied) == before


def test_a_run_whose_newest_checkpoint_is_damaged_is_the_one_before(copied):
    flip(copied / "checkpoints/step-00000006/model.safetensors")
    before = names(copied)
    found = open_pretrained(copied)
    assert found.path == copied / "checkpoints/step-00000003"
    assert weights(found) == weights(open_pretrained("run", step=3))
    assert names(copied) == before
    with pytest.raises(InvalidSnapshot, match="00006 cannot be used: model"):
        open_pretrained(copied, step=6)
    assert names(copied) == before
    # a run that has none left says what the newest lacks
    flip(copied / "checkpoints/step-00000003/model.safetensors")
    with pytest.raises(NoCheckpoint, match=r"no intact checkpoint: .*00006 cannot be used"):
        open_pretrained(copied)
    assert names(copied) == before


def test_a_step_that_a_run_does_not_have_is_refused_with_those_it_has():
    with pytest.raises(InvalidConfig, match="run has no checkpoint of step 4; it has 3, 6"):
        open_pretrained("run", step=4)


def test_a_run_without_a_checkpoint_says_what_is_missing(tmp_path):
    RunDir.create(tmp_path / "young", {})
    with pytest.raises(NoCheckpoint, match="no intact checkpoint yet; train it until"):
        open_pretrained(tmp_path / "young")


def test_a_weights_file_is_opened_with_the_tokenizer_beside_it(tmp_path):
    path = saved(tmp_path, ends=(5,))
    found = open_pretrained(path)
    assert found.source == f"weights {path}"
    assert found.files.tokenizer.to_str() == small_tokenizer().to_str()
    assert found.files.ends == (0, 5)
    # one that is named goes before it
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "tokenizer.json", tmp_path / "other")
    assert open_pretrained(path, tmp_path / "other").files.ends == (0,)
    (tmp_path / "tokenizer.json").unlink()
    assert open_pretrained(path).files is None


def test_a_directory_is_opened_with_its_tokenizer(tmp_path):
    model = TransformerLm.load_bin(FIXTURES / "dense" / "trained.rbw")
    model.save_pretrained(tmp_path / "out")
    found = open_pretrained(tmp_path / "out")
    assert found.source == f"directory {tmp_path / 'out'}"
    assert weights(found) == [tensor.numpy().tobytes() for _, tensor in model.weights()]
    assert found.files is None


def test_what_is_no_model_is_refused_with_what_would_be_one(tmp_path):
    with pytest.raises(InvalidConfig, match="is no model that fastbrain opens: give a run"):
        open_pretrained("tiny.toml")
    with pytest.raises(InvalidConfig, match=r"neither a run \(it has no config.toml\) nor a model"):
        open_pretrained(tmp_path)
    with pytest.raises(InvalidConfig, match=f"a step was given, and {tmp_path} is no run"):
        open_pretrained(tmp_path, step=3)
    with pytest.raises(Io, match=r"cannot read .*none: No such file"):
        open_pretrained(tmp_path / "none")


def test_a_manifest_of_something_else_is_refused(copied):
    path = copied / "checkpoints" / "step-00000006"
    for content in ({"step": 6}, {"run_id": "x", "step": None}, {"run_id": "x", "step": "six"}):
        (path / "MANIFEST.json").write_text(json.dumps(content))
        with pytest.raises(InvalidSnapshot, match=r"MANIFEST\.json is not one that fastb"):
            open_pretrained(path)
