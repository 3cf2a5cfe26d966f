"""A fine-tuning run that goes on: what may not change, and what follows from data made anew."""

import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from instruction_runs import base, pairs
from training_runs import VOCAB, checkpoint, entered, run

from fastbrain import cli
from fastbrain.errors import InvalidConfig
from fastbrain.tokens import TokenFile
from fastbrain.tokens.chat_template import CHATML
from fastbrain.tokens.tokenizer import tokenizer_sha256, train_tokenizer
from fastbrain.training import resuming
from fastbrain.training.settings import Settings

# a step at each start
ONE = ("train.max_time=0.001s", "eval.samples=0")


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("resumes")) as folder:
        base(folder / "model")
        shutil.copytree("model", "same")
        for name, count in (("pairs", 48), ("more", 120), ("fewer", 40)):
            pairs(folder / f"{name}.jsonl", count)
        Path("ours.jinja").write_text(CHATML + "{# ours #}")
        assert sft("half", "--epochs=2") == 75
        yield folder


def sft(name: str, *more: str) -> int:
    settings = ("data.seq_len=48", "train.global_batch_size=3", *ONE)
    return cli.main(["sft", "model", "pairs.jsonl", "--run", name, *settings, *more])


def resume(name: str, *more: str) -> int:
    return cli.main(["resume", name, *ONE, *more])


def copied(name: str) -> str:
    shutil.copytree("half", name)
    return name


def config(name: str) -> dict:
    return tomllib.loads(Path(name, "config.toml").read_text())


def recorded(name: str, step: int) -> dict:
    return json.loads((checkpoint(name, step) / "trainer_state.json").read_text())


@pytest.mark.parametrize("change", ["train.init=same", "data.template=ours.jinja"])
def test_another_beginning_is_another_run(change, capsys):
    before = Path("half/config.toml").read_bytes()
    assert resume("half", change) == 2
    said = capsys.readouterr().err
    assert f"this is not the run that began there: {change.split('=')[0]} was " in said
    assert resume("half", "--override", change) == 2
    assert "this cannot be changed in the middle of a run" in capsys.readouterr().err
    assert Path("half/config.toml").read_bytes() == before


def decided() -> Settings:
    then = Settings.from_tables(config("half"))
    assert then.train.init_sha256
    assert then.train.epoch_rows == 24
    return then


def test_what_the_command_does_not_say_is_as_it_was():
    then = decided()
    wanted = then.with_train(
        init_sha256=None, epoch_rows=None, warmup_steps=None, precision=None,
        micro_batch_size="auto", max_time="1h",
    )  # fmt: skip
    wanted = replace(wanted, model={})
    found = resuming.continued(then, wanted, 1)
    assert found == then.with_train(max_time="1h")


@pytest.mark.parametrize("key", ["train.init", "data.template", "data.tokenizer", "train.seed"])
def test_what_a_run_began_with_is_never_overridden(key):
    then, (table, name) = decided(), key.split(".")
    value = 7 if name == "seed" else "other"
    wanted = replace(then, **{table: replace(getattr(then, table), **{name: value})})
    with pytest.raises(InvalidConfig, match=f"not the run that began there: {key} was .* {value}"):
        resuming.continued(then, wanted, 1, {key})


def test_a_run_is_not_made_shorter_than_it_is():
    then = decided()
    assert then.steps == 16
    half = then.with_train(epochs=1)
    assert resuming.continued(then, half, 8, {"train.epochs"}) == half
    with pytest.raises(InvalidConfig, match="the run would have 8 steps, and 9 are done"):
        resuming.continued(then, half, 9, {"train.epochs"})


def test_an_override_leaves_the_digest_the_rows_and_the_warm_up_in_the_configuration():
    name = copied("kept")
    before = config(name)["train"]
    assert before["warmup_steps"] == 1
    # two percent of the run would be twenty steps now
    assert resume(name, "--override", "train.epochs=125") == 75
    assert config(name)["train"] == before | {"epochs": 125}
    assert recorded(name, 2)["config"]["train"]["warmup_steps"] == 1
    assert recorded(name, 2)["config"]["train"]["epoch_rows"] == 24
    # the command that began it, with no more than it had to say
    assert sft(name, "--epochs=125", "--resume=auto", "train.max_time=0.002s") == 75
    assert config(name)["train"] == before | {"epochs": 125}
    assert recorded(name, 3)["config"]["train"]["init_sha256"] == before["init_sha256"]


def test_more_rows_make_longer_epochs(capsys):
    name = copied("longer")
    assert resume(name, "--override", "data.train=more.jsonl") == 75
    rows = config(name)["train"]["epoch_rows"]
    assert rows > 48
    assert recorded(name, 2)["config"]["train"]["epoch_rows"] == rows
    said = capsys.readouterr().out
    assert f"{-(-2 * rows // 3)} steps of 144 tokens" in said
    assert f"step 2/{-(-2 * rows // 3)} " in said


def test_checkpoints_of_all_earlier_data_belong_to_the_run(capsys):
    name = copied("earlier")
    for data in ("more.jsonl", "fewer.jsonl"):
        assert resume(name, "--override", f"data.train={data}") == 75
    assert resume(name, "--step=1") == 75
    assert f"going on from {checkpoint(name, 1)}" in capsys.readouterr().out


def test_tokens_that_were_replaced_with_their_record_are_refused(capsys):
    assert run("tokens", *ONE) == 75
    shutil.copytree("tokens", "mixed")
    TokenFile.write("corpus.bin", np.random.default_rng(9).integers(0, VOCAB, 2_000))
    assert run("others", *ONE) == 75
    shutil.copy("others/data/corpus.json", "mixed/data/corpus.json")
    assert resume("mixed") == 2
    said = capsys.readouterr().err
    assert "the checkpoint was trained with another token file: " in said
    for name in ("tokens", "others"):
        record = json.loads(Path(name, "data/corpus.json").read_text())
        assert record["files"]["train"]["sha256"] in said


def test_a_tokenizer_that_was_replaced_with_its_record_is_refused(capsys):
    name = copied("words")
    record = Path(name, "data/corpus.json")
    document = json.loads(record.read_text())
    other = train_tokenizer(["other words make other tokens"] * 3, 300)
    Path(name, "data/tokenizer.json").write_text(other.to_str())
    now = {"tokenizer_sha256": tokenizer_sha256(other), "ends": []}
    record.write_text(json.dumps(document | now))
    assert resume(name) == 2
    said = capsys.readouterr().err
    assert "the checkpoint was trained with another tokenizer (sha256): " in said
    assert f"{document['tokenizer_sha256']} there, {now['tokenizer_sha256']} here" in said
