"""From checked settings to a trainer that is ready to run: tokens, model, device, checkpoint."""

from pathlib import Path

import torch

from fastbrain.devices import claim_cuda
from fastbrain.distributed_model import DDP, FSDP
from fastbrain.errors import UnsupportedCuda
from fastbrain.lm import TransformerLm
from fastbrain.parallel.ranks import Ranks
from fastbrain.plan import Choice
from fastbrain.training import (
    checkpoint,
    data,
    devices,
    environment,
    following,
    manifest,
    resuming,
    sharing,
)
from fastbrain.training.command import GoingOn, Request
from fastbrain.training.corpus import Corpus
from fastbrain.training.devices import Device
from fastbrain.training.guard import Guard
from fastbrain.training.initial import build, fresh, inherit, open_base
from fastbrain.training.loop import Trainer
from fastbrain.training.pretrained import Pretrained
from fastbrain.training.progress import Console
from fastbrain.training.run_dir import RunDir
from fastbrain.training.settings import Settings
from fastbrain.training.state import State


def begin(request: Request, ranks: Ranks, console: Console) -> Trainer:
    """Make a new run: its tokens, its configuration with everything decided, its model.

    The directory counts as a run once config.toml is there, which is written last: one that was
    killed before is simply begun again. Of several ranks the first makes what is on the disk.

    Raises:
        FastBrainError: anything that speaks against the run; nothing was trained then.
    """
    path, device = request.path, Device.find(ranks)
    settings, base = ranks.in_turn(lambda: _based(request.settings, ranks, console))
    files = None if base is None else base.files
    vocab_size = ranks.first(lambda: data.make(settings, path / "data", console.say, files))
    settings, corpus = ranks.in_turn(lambda: _decided(settings, vocab_size, device, path))
    choice = sharing.choice(settings, device, ranks)
    if ranks.leads:
        shards = ranks.size if choice is not None and choice.parallel == FSDP else 1
        config = settings.config(vocab_size)
        devices.check_space(config, device, path, ranks.local_size, shards)
    model = build(settings, None if base is None else base.model)
    del base
    size = _distribute(model, settings, device, ranks, choice)
    settings = settings.with_train(micro_batch_size=size)
    run = RunDir.create(path, settings.tables()) if ranks.leads else None
    ranks.barrier()
    run = run or following.open_run(path)
    _introduce(run, settings, model, corpus, device, ranks, choice, console)
    state = _fresh(settings)
    return Trainer(run, request.lock, settings, model, corpus, device, ranks, console, state)


def _based(
    settings: Settings, ranks: Ranks, console: Console
) -> tuple[Settings, Pretrained | None]:
    """The settings, and the model that `train.init` names, whose shape they then have."""
    sharing.require_split(settings, ranks)
    if settings.train.init is None:
        return settings, None
    base = open_base(settings)
    console.say(f"beginning from {base.source}")
    settings = inherit(settings, base.model)
    settings.check()
    return settings, base


def _decided(
    settings: Settings, vocab_size: int, device: Device, path: Path
) -> tuple[Settings, Corpus]:
    """The settings with all that the run decides for itself, and its rows."""
    following.require_seen(path / "data", path)
    config, corpus = settings.config(vocab_size), data.open_corpus(settings, path / "data")
    precision = settings.train.precision or ("bf16-mixed" if device.is_cuda else "f32")
    settings = settings.with_model(config).with_train(
        precision=precision, epoch_rows=corpus.epoch_rows
    )
    settings = settings.with_train(warmup_steps=settings.warmup)
    settings.check()
    return settings, corpus


def go_on(request: Request, going_on: GoingOn, ranks: Ranks, console: Console) -> Trainer:
    """Go on with a run from a checkpoint, or from the start if it never came to one.

    Raises:
        FastBrainError: the checkpoint does not belong to this run, its data or its model.
    """
    run, found = going_on.run, going_on.checkpoint
    settings = sharing.split_anew(request.settings, going_on.then, ranks)
    ranks.in_turn(lambda: sharing.require_split(settings, ranks))
    device = Device.find(ranks)
    folder, record = run.path / "data", None
    if going_on.remake_data:
        record = ranks.first(lambda: data.remake(settings, folder, console.say))
    corpus = ranks.in_turn(lambda: data.open_corpus(settings, folder, record))
    settings = settings.with_train(epoch_rows=corpus.epoch_rows)
    ranks.in_turn(lambda: resuming.require_length(settings, found.step if found else 0))
    choice = sharing.choice(settings, device, ranks)
    model = build(settings) if found is None else fresh(settings)
    _distribute(model, settings, device, ranks, choice)
    changes = resuming.changes(going_on.then, settings, found.step if found else 0)
    _introduce(run, settings, model, corpus, device, ranks, choice, console)
    rollbacks = following.rollbacks(run, ranks)
    if found is None:
        console.say("there is no checkpoint yet: beginning at step 0")
        state = _fresh(settings, rollbacks)
    else:
        state = ranks.in_turn(lambda: checkpoint.restore(found, model, corpus, settings, rollbacks))
        console.say(f"going on from {found.path}")
        recorded = manifest.document(found.path / "trainer_state.json")
        now = environment.environment(device, settings, ranks.size, model.parallel)
        changes += environment.differences(recorded, now)
    # once nothing speaks against it, on any rank
    ranks.barrier()
    if record is not None and ranks.leads:
        data.keep(record, folder)
    if going_on.overriding and ranks.leads:
        # the next start then needs no more than the first
        run = run.rewritten(settings.tables(), going_on.overridden)
    for change in changes:
        console.say(f"warning: {change}")
    if changes:
        console.say("warning: so the results differ, if only in their last bits, from here on")
    return Trainer(run, request.lock, settings, model, corpus, device, ranks, console, state)


def _fresh(settings: Settings, rollbacks: list[tuple[int, int]] | None = None) -> State:
    return State(guard=Guard(settings.guard.policy, data_skips=rollbacks or []))


def _distribute(
    model: TransformerLm,
    settings: Settings,
    device: Device,
    ranks: Ranks,
    choice: Choice | None,
) -> int:
    """Bring a model to where it trains, and share it with the other ranks.

    Returns the rows of a micro-batch: those decided, or what fits.
    """
    micro, rows = settings.train.micro_batch_size, settings.train.global_batch_size // ranks.size
    if choice is not None and choice.parallel == FSDP:
        if device.is_cuda:
            claim_cuda(device.torch_device.index, 0, 0)
        if micro == "auto":
            micro = sharing.planned_micro_batch_size(settings, device, ranks)
        model.distribute(ranks, FSDP)
        return int(micro)
    _on_device(model, device)
    if micro == "auto":
        found = devices.micro_batch_size(model, device, rows, settings.data.seq_len)
        # all of them divide the same number of rows, so the least does
        micro = ranks.lowest(found)
    model.distribute(ranks, DDP)
    return int(micro)


def _on_device(model: TransformerLm, device: Device) -> None:
    if device.is_cuda:
        try:
            model.to_cuda(device.torch_device.index)
        except UnsupportedCuda as error:
            raise UnsupportedCuda(
                f"{error}; to train on the CPU instead, hide the card by setting the environment "
                "variable CUDA_VISIBLE_DEVICES to nothing"
            ) from error


def _introduce(
    run: RunDir,
    settings: Settings,
    model: TransformerLm,
    corpus: Corpus,
    device: Device,
    ranks: Ranks,
    choice: Choice | None,
    console: Console,
) -> None:
    train, tokens = settings.train, settings.step_tokens
    micro = int(train.micro_batch_size)
    threads = "" if device.is_cuda else f" ({torch.get_num_threads()} threads)"
    each = f" on each of {ranks.size} processes" if choice is not None else ""
    where = f"{ranks.size} x {device.name}" if choice is not None else device.name
    console.say(f"run {run.path} on {where}{threads}, {train.precision}")
    if choice is not None:
        console.say(f"shared by {choice.parallel} ({choice.why})")
    elif train.parallel != "auto":
        console.say(f"train.parallel {train.parallel}: nothing to share, there is one process")
    console.say(f"model: {model.parameter_counts()}, vocabulary {model.config.vocab_size:,}")
    console.say(corpus.sizes())
    console.say(
        f"{settings.steps:,} steps of {tokens:,} tokens ({train.global_batch_size} rows of "
        f"{settings.data.seq_len}, {micro} at once{each}), warm-up {settings.warmup}"
    )
