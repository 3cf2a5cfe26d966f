"""The command line of `sft`: how fast and how long it trains where the user does not say."""

import argparse
import sys
from pathlib import Path

import pytest

from fastbrain.training import command, sft_command
from fastbrain.training.progress import Console
from fastbrain.training.settings import Settings


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A folder with what the command names; nothing is read before the run begins."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    for name in ("answers.jsonl", "held.jsonl", "chat.jinja"):
        Path(name).touch()
    Path("own.toml").write_text(
        '[data]\nkind = "instructions"\n[train]\nlearning_rate = 7e-4\nepochs = 2\n'
    )


def asked(*arguments: str) -> Settings:
    parser = argparse.ArgumentParser()
    sft_command.add_arguments(parser)
    options = command.parse(parser, ["model", "answers.jsonl", *arguments])
    request = options.request(options, Console(sys.stderr))
    request.lock.release()
    return request.settings


@pytest.mark.parametrize(
    ("arguments", "rate"),
    [
        ([], 5e-5),
        (["--lora-rank=4"], 2e-4),
        (["--lora-rank=4", "--lora-alpha=8", "--epochs=2"], 2e-4),
        (["--config=own.toml"], 7e-4),
        (["--config=own.toml", "--lora-rank=4"], 7e-4),
        (["train.learning_rate=1e-3", "--lora-rank=4"], 1e-3),
        (["--override", "train.learning_rate=1e-3", "--lora-rank=4"], 1e-3),
        (["--config=own.toml", "--lora-rank=4", "train.learning_rate=1e-3"], 1e-3),
    ],
)
def test_adapters_learn_faster_unless_a_rate_is_given(arguments, rate):
    assert asked(*arguments).train.learning_rate == rate


def test_options_are_settings():
    options = ("--validation=held.jsonl", "--template=chat.jinja", "--skip-bad", "--epochs=4")
    settings = asked(*options, "--lora-rank=4", "--lora-alpha=8", "--lora-seed=5")
    assert settings.train.init == str(Path("model").absolute())
    assert settings.data.train == str(Path("answers.jsonl").absolute())
    assert settings.data.validation == str(Path("held.jsonl").absolute())
    assert settings.data.template == str(Path("chat.jinja").absolute())
    assert (settings.data.kind, settings.data.skip_bad) == ("instructions", True)
    assert settings.train.epochs == 4
    assert settings.model["lora"] == {"rank": 4, "alpha": 8.0, "seed": 5}
    plain = asked()
    assert (plain.train.epochs, plain.data.skip_bad, plain.model) == (3, False, {})
    assert (plain.data.validation, plain.data.template) == (None, None)


def test_a_length_that_is_given_takes_the_place_of_the_epochs():
    assert asked("train.max_steps=5").steps == 5
    assert asked("train.max_steps=5").train.epochs is None


@pytest.mark.parametrize(
    ("epochs", "rows", "size", "steps"),
    [(1, 5, 2, 3), (2, 5, 2, 5), (1, 4, 2, 2), (1, 1, 8, 1), (3, 24, 5, 15), (3, None, 5, 0)],
)
def test_every_row_of_every_epoch_is_read(epochs, rows, size, steps):
    settings = asked(f"--epochs={epochs}", f"train.global_batch_size={size}")
    assert settings.with_train(epoch_rows=rows).steps == steps


@pytest.mark.parametrize(("tokens", "steps"), [(1, 1), (96, 1), (97, 2), (192, 2), (193, 3)])
def test_the_tokens_that_were_asked_for_are_reached(tokens, steps):
    settings = asked(f"train.max_tokens={tokens}", "train.global_batch_size=2", "data.seq_len=48")
    assert settings.steps == steps


@pytest.mark.parametrize(("steps", "warmup"), [(1, 1), (50, 1), (51, 2), (1_000, 20)])
def test_a_fiftieth_of_the_run_warms_up(steps, warmup):
    settings = asked(f"train.max_steps={steps}")
    assert settings.warmup == warmup
    assert settings.with_train(warmup_steps=0).warmup == 0


def test_data_are_instructions_whatever_a_configuration_leaves_out():
    Path("plain.toml").write_text("[train]\nmax_steps = 2\n")
    assert asked("--config=plain.toml").data.kind == "instructions"
