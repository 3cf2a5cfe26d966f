"""What decides the results changes in the middle of a run only where the user says so by name."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from training_runs import VOCAB, bits, checkpoint, entered, run

from fastbrain import cli
from fastbrain.tokens import TokenFile
from fastbrain.training import metrics


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("overrides")) as folder:
        assert run("half", "train.max_time=0.001s", "save.interval_steps=2") == 75
        yield folder


def copied(name: str) -> str:
    import shutil

    shutil.copytree("half", name)
    return name


def config(name: str) -> dict:
    return tomllib.loads(Path(name, "config.toml").read_text())


def test_a_rate_changes_by_override_and_stays_changed(capsys):
    name = copied("rate")
    assert cli.main(["resume", name, "train.learning_rate=1e-3"]) == 2
    said = capsys.readouterr().err
    assert "train.learning_rate was 0.01 and is now 0.001" in said
    assert "The learning rate at step 1 was 0.01 and is now 0.001; at the end it was 0.001" in said
    assert said.endswith("say that you mean it: --override train.learning_rate=0.001\n")
    before = Path(name, "config.toml").read_bytes()
    assert cli.main(["resume", name, "--override", "train.learning_rate=1e-3",
                     "train.max_time=0.001s"]) == 75  # fmt: skip
    said = capsys.readouterr().out
    assert "warning: train.learning_rate was 0.01 and is now 0.001" in said
    assert "warning: so the results differ, if only in their last bits, from here on" in said
    now = config(name)
    assert now["train"]["learning_rate"] == 1e-3
    assert now["overridden"] == ["train.learning_rate"]
    assert now["run_id"] == tomllib.loads(before.decode())["run_id"]
    # the next start needs no more than the first
    assert cli.main(["resume", name, "train.max_time=1h"]) == 0
    rates = [
        row["learning_rate"] for row in metrics.read(Path(name, "metrics.jsonl")) if "loss" in row
    ]
    assert rates[0] == pytest.approx(1e-2)
    assert all(rate <= 1e-3 for rate in rates[1:])


def test_a_second_override_of_a_key_holds_as_the_first():
    name = copied("twice")
    stop = "train.max_time=0.001s"
    for decay in (0.2, 0.3):
        assert cli.main(["resume", name, "--override", f"train.weight_decay={decay}", stop]) == 75
        assert config(name)["train"]["weight_decay"] == decay
    assert cli.main(["resume", name, stop]) == 75
    newest = max(Path(name, "checkpoints").iterdir())
    recorded = json.loads((newest / "trainer_state.json").read_bytes())
    assert recorded["config"]["train"]["weight_decay"] == 0.3


def test_a_refused_override_leaves_the_configuration_alone(capsys):
    name = copied("kept")
    before = Path(name, "config.toml").read_bytes()
    corpus = Path(name, "data/corpus.json")
    corpus.write_text(corpus.read_text().replace('"max_id"', '"max"'))
    assert cli.main(["resume", name, "--override", "train.weight_decay=0.2"]) == 2
    assert "corpus.json is damaged" in capsys.readouterr().err
    assert Path(name, "config.toml").read_bytes() == before


def test_an_edited_configuration_is_found_out(capsys):
    name = copied("edited")
    path = Path(name, "config.toml")
    path.write_text(path.read_text().replace("weight_decay = 0.1", "weight_decay = 0.2"))
    assert cli.main(["resume", name]) == 2
    assert "train.weight_decay was 0.1 and is now 0.2" in capsys.readouterr().err
    assert cli.main(["resume", name, "--override", "train.weight_decay=0.2",
                     "train.max_time=1h"]) == 0  # fmt: skip


@pytest.mark.parametrize("key", ["train.seed=1", "model.d_ff=40", "save.keep=1", "train.sed=1"])
def test_what_is_not_for_override_is_refused(capsys, key):
    assert cli.main(["resume", "half", "--override", key]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert key.split("=")[0] in said


def test_other_rows_in_the_middle(capsys):
    name = copied("rows")
    assert cli.main(["resume", name, "train.global_batch_size=16"]) == 2
    assert "train.global_batch_size was 8 and is now 16" in capsys.readouterr().err
    assert cli.main(["resume", name, "--override", "train.global_batch_size=16",
                     "train.max_time=1h"]) == 0  # fmt: skip
    state = json.loads((checkpoint(name, 6) / "trainer_state.json").read_bytes())
    assert state["config"]["train"]["global_batch_size"] == 16


def test_text_that_was_replaced_goes_on_by_override_only(capsys):
    name = copied("text")
    other = np.random.default_rng(1).integers(0, VOCAB, 3_000)
    TokenFile.write("other.bin", other)
    assert cli.main(["resume", name, "data.train=other.bin"]) == 2
    assert "data.train was" in capsys.readouterr().err
    assert cli.main(["resume", name, "--override", "data.train=none.bin"]) == 2
    assert "there is no file or folder" in capsys.readouterr().err
    assert cli.main(["resume", name, "--override", "data.train=other.bin",
                     "train.max_time=0.001s"]) == 75  # fmt: skip
    # killed before its first save, it would have to find the old fingerprint acceptable
    cli.main(["resume", name, "--step", "1", "train.max_time=0.001s"])
    assert cli.main(["resume", name, "train.max_time=1h"]) == 0
    recorded = json.loads(Path(name, "data/corpus.json").read_bytes())
    assert [each["train"]["tokens"] for each in recorded["replaced"]] == [2_000]
    assert recorded["files"]["train"]["tokens"] == 3_000
    # tokens of another vocabulary are refused like at the beginning
    TokenFile.write("large.bin", np.full(3_000, VOCAB))
    assert cli.main(["resume", name, "--override", "data.train=large.bin"]) == 2
    assert f"token id {VOCAB} is outside the vocabulary" in capsys.readouterr().err


def test_a_changed_split_of_a_step_is_a_warning(capsys):
    name = copied("split")
    assert cli.main(["resume", name, "train.micro_batch_size=4", "train.max_time=1h"]) == 0
    said = capsys.readouterr().out
    assert "warning: micro batch size was 8, is 4" in said


def test_without_a_difference_the_bits_are_equal(capsys):
    name = copied("same")
    assert cli.main(["resume", name, "train.max_time=1h", "save.keep=9", "eval.samples=0"]) == 0
    assert "warning" not in capsys.readouterr().out
    assert run("whole") == 0
    assert bits(name, 6) == bits("whole", 6)
