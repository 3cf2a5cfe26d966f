"""What ranks do in tests of agreement: train as a user's commands say, and tell what was fed."""

import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch

from fastbrain import cli, moe
from fastbrain.lm import TransformerLm
from fastbrain.parallel.launch import Launch
from fastbrain.parallel.ranks import Ranks
from fastbrain.parallel.shards import part
from fastbrain.training.loop import Trainer


@contextmanager
def meeting() -> Iterator[Ranks]:
    """The ranks of this job; programs that run inside join them, and need no port of their own."""
    ranks = Ranks.join(Launch.find())
    with (
        patch.object(Ranks, "join", lambda launch: ranks),
        patch.object(Ranks, "leave", Ranks.barrier),
    ):
        yield ranks
    ranks.leave()


def commands(lines: list[list[str]]) -> list[dict]:
    """Run command lines of `fastbrain` one after the other; what was fed in each.

    A line may be "copy FROM TO" too, of runs.

    Returns:
        For each line its exit code, and for every step the checksums of this rank's rows in turn
        ("rows") and the experts that their tokens went to in a model of one MoE layer ("routes").
    """
    with meeting() as ranks:
        return [_command(line, ranks) for line in lines]


def _command(words: list[str], ranks: Ranks) -> dict:
    if words[0] == "copy":
        ranks.first(lambda: shutil.copytree(*words[1:]))
        return {}
    rows: list[list[int]] = []
    routes: list[str] = []
    inside = False
    step, accumulate, experts = Trainer._train_step, TransformerLm.accumulate_step, moe.expert_ffn

    def train_step(trainer):
        nonlocal inside
        inside = True
        rows.append([])
        routes.append("")
        step(trainer)
        inside = False

    def fed(model, batch, **options):
        rows[-1] += [zlib.crc32(row.tobytes()) for row in batch.ids.numpy()]
        return accumulate(model, batch, **options)

    def routed(x, gate_up, down, expert_ids, *rest):
        if inside:
            routes[-1] += "".join(map(str, expert_ids.flatten().tolist()))
        return experts(x, gate_up, down, expert_ids, *rest)

    with (
        patch.object(Trainer, "_train_step", train_step),
        patch.object(TransformerLm, "accumulate_step", fed),
        patch.object(moe, "expert_ffn", routed),
    ):
        code = cli.main(words)
    return {"code": code, "rows": rows, "routes": routes}


def unchanged(lines: list[list[str]]) -> list[dict]:
    """`commands`, with every update left out."""

    def skipping(model, *_):
        norm = model.grad_norm()
        model.zero_grad()
        return norm

    with patch.object(TransformerLm, "step_clipped", skipping):
        return commands(lines)


def guarded(options: list[str], step: int, places: list[list]) -> list[dict]:
    """One run whose update of a step is left out, and runs in which that step is spoiled.

    Args:
        options: of all of them.
        step: counted from 0.
        places: for each run the rank, which of that rank's micro-batches, what ("loss", "first" or
            "last" gradient), and the value as text.

    Returns:
        Of each run its exit code, and this rank's count of skips, updates and checksum of all that
        it has of the model.
    """
    with meeting() as ranks:
        with _without_update(step):
            found = [_trained("left-out", options)]
        for index, (rank, micro, where, value) in enumerate(places):
            micros = 1 << 30 if rank != ranks.rank else micro
            with _spoiled(step, micros, where, float(value)):
                found.append(_trained(f"spoiled-{index}", options))
    return found


def _trained(name: str, options: list[str]) -> dict:
    trainers, run = [], Trainer.run

    def remembering(trainer):
        trainers.append(trainer)
        return run(trainer)

    with patch.object(Trainer, "run", remembering):
        code = cli.main(["train", "tiny.toml", "--run", name, *options])
    [trainer] = trainers
    tensors = [each for kind in trainer.model.tensors().values() for each in kind.values()]
    return {
        "code": code,
        "skipped": trainer.state.skipped,
        "updates": trainer.model.optimizer_step(),
        "checksum": zlib.crc32(b"".join(part(each).numpy().tobytes() for each in tensors)),
    }


@contextmanager
def _without_update(step: int) -> Iterator[None]:
    clip, calls = TransformerLm.step_clipped, iter(range(1 << 30))

    def skipping(model, *arguments):
        if next(calls) != step:
            return clip(model, *arguments)
        norm = model.grad_norm()
        model.zero_grad()
        return norm

    with patch.object(TransformerLm, "step_clipped", skipping):
        yield


@contextmanager
def _spoiled(step: int, micro: int, where: str, value: float) -> Iterator[None]:
    """Put `value` into a micro-batch of this rank, or into an element of its gradient."""
    accumulate, train_step = TransformerLm.accumulate_step, Trainer._train_step
    now = {"step": -1, "micro": -1}

    def counted(trainer):
        now.update(step=trainer.state.step, micro=-1)
        train_step(trainer)

    def spoil(gradient):
        bad = part(gradient).clone()
        bad.view(-1)[-1] = value
        return bad

    def spoiled(model, batch, **options):
        now["micro"] += 1
        if now != {"step": step, "micro": micro}:
            return accumulate(model, batch, **options)
        parameters = list(model.module.parameters())
        target = parameters[0 if where == "first" else -1]
        hook = None
        if where != "loss" and not model.sharded:
            # before replicas add it up
            hook = target.register_hook(spoil)
        losses = accumulate(model, batch, **options)
        if hook is not None:
            hook.remove()
        if where == "loss":
            return replace(losses, lm_loss_sum=torch.full_like(losses.lm_loss_sum, value))
        if model.sharded:
            part(target.grad).copy_(spoil(target.grad))
        return losses

    with (
        patch.object(Trainer, "_train_step", counted),
        patch.object(TransformerLm, "accumulate_step", spoiled),
    ):
        yield
