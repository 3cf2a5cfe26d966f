"""From checked settings to a trainer that is ready to run: tokens, model, device, checkpoint."""

from pathlib import Path

import torch

from fastbrain.errors import UnsupportedCuda
from fastbrain.lm import TransformerLm
from fastbrain.training import (
    checkpoint,
    data,
    devices,
    environment,
    guard_log,
    manifest,
    resuming,
)
from fastbrain.training.command import GoingOn
from fastbrain.training.corpus import Corpus
from fastbrain.training.devices import Device
from fastbrain.training.guard import Guard
from fastbrain.training.initial import build, fresh, inherit, open_base
from fastbrain.training.lock import Lock
from fastbrain.training.loop import Trainer
from fastbrain.training.progress import Console
from fastbrain.training.run_dir import RunDir
from fastbrain.training.settings import Settings
from fastbrain.training.state import State


def begin(path: Path, lock: Lock, settings: Settings, console: Console) -> Trainer:
    """Make a new run at `path`: its tokens, its configuration with everything decided, its model.

    The directory counts as a run once config.toml is there, which is written last: one that was
    killed before is simply begun again.

    Raises:
        FastBrainError: anything that speaks against the run; nothing was trained then.
    """
    device = Device.find()
    base = None
    if settings.train.init is not None:
        base = open_base(settings)
        console.say(f"beginning from {base.source}")
        settings = inherit(settings, base.model)
        settings.check()
    files = None if base is None else base.files
    vocab_size = data.make(settings, path / "data", console.say, files)
    config = settings.config(vocab_size)
    devices.check_space(config, device, path)
    corpus = data.open_corpus(settings, path / "data")
    precision = settings.train.precision or ("bf16-mixed" if device.is_cuda else "f32")
    settings = settings.with_model(config).with_train(
        precision=precision, epoch_rows=corpus.epoch_rows
    )
    settings = settings.with_train(warmup_steps=settings.warmup)
    settings.check()
    model = _on_device(build(settings, None if base is None else base.model), device)
    del base
    if settings.train.micro_batch_size == "auto":
        rows, seq_len = settings.train.global_batch_size, settings.data.seq_len
        size = devices.micro_batch_size(model, device, rows, seq_len)
        settings = settings.with_train(micro_batch_size=size)
    run = RunDir.create(path, settings.tables())
    _introduce(run, settings, model, corpus, device, console)
    return Trainer(run, lock, settings, model, corpus, device, console, _fresh(settings))


def go_on(going_on: GoingOn, lock: Lock, settings: Settings, console: Console) -> Trainer:
    """Go on with a run from a checkpoint, or from the start if it never came to one.

    Raises:
        FastBrainError: the checkpoint does not belong to this run, its data or its model.
    """
    run, found = going_on.run, going_on.checkpoint
    device = Device.find()
    folder, record = run.path / "data", None
    if going_on.remake_data:
        record = data.remake(settings, folder, console.say)
    corpus = data.open_corpus(settings, folder, record)
    settings = settings.with_train(epoch_rows=corpus.epoch_rows)
    resuming.require_length(settings, found.step if found else 0)
    model = _on_device(build(settings) if found is None else fresh(settings), device)
    changes = resuming.changes(going_on.then, settings, found.step if found else 0)
    _introduce(run, settings, model, corpus, device, console)
    rollbacks = guard_log.rollbacks(run.guard_log)
    if found is None:
        console.say("there is no checkpoint yet: beginning at step 0")
        state = _fresh(settings, rollbacks)
    else:
        state = checkpoint.restore(found, model, corpus, settings, rollbacks)
        console.say(f"going on from {found.path}")
        recorded = manifest.document(found.path / "trainer_state.json")
        changes += environment.differences(recorded, environment.environment(device, settings))
    if record is not None:
        data.keep(record, folder)
    if going_on.overriding:
        # once nothing speaks against it; the next start then needs no more than the first
        run = run.rewritten(settings.tables(), going_on.overridden)
    for change in changes:
        console.say(f"warning: {change}")
    if changes:
        console.say("warning: so the results differ, if only in their last bits, from here on")
    return Trainer(run, lock, settings, model, corpus, device, console, state)


def _fresh(settings: Settings, rollbacks: list[tuple[int, int]] | None = None) -> State:
    return State(guard=Guard(settings.guard.policy, data_skips=rollbacks or []))


def _on_device(model: TransformerLm, device: Device) -> TransformerLm:
    if device.is_cuda:
        try:
            model.to_cuda(device.torch_device.index)
        except UnsupportedCuda as error:
            raise UnsupportedCuda(
                f"{error}; to train on the CPU instead, hide the card by setting the environment "
                "variable CUDA_VISIBLE_DEVICES to nothing"
            ) from error
    return model


def _introduce(
    run: RunDir,
    settings: Settings,
    model: TransformerLm,
    corpus: Corpus,
    device: Device,
    console: Console,
) -> None:
    train, tokens = settings.train, settings.step_tokens
    micro = int(train.micro_batch_size)
    threads = "" if device.is_cuda else f" ({torch.get_num_threads()} threads)"
    console.say(f"run {run.path} on {device.name}{threads}, {train.precision}")
    console.say(f"model: {model.parameter_counts()}, vocabulary {model.config.vocab_size:,}")
    console.say(corpus.sizes())
    console.say(
        f"{settings.steps:,} steps of {tokens:,} tokens ({train.global_batch_size} rows of "
        f"{settings.data.seq_len}, {micro} at once), warm-up {settings.warmup}"
    )
