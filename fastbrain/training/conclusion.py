"""What a run says when it ends, well or not."""

from collections.abc import Callable, Mapping
from typing import Any

from fastbrain.config import ParameterCounts
from fastbrain.errors import FastBrainError, Io
from fastbrain.parallel.ranks import Ranks
from fastbrain.plan.cards import THIS_MACHINE
from fastbrain.plan.remedies import remedies as planned
from fastbrain.training import chart, metrics
from fastbrain.training.progress import short_time
from fastbrain.training.run_dir import RunDir
from fastbrain.training.settings import Settings

OUT_OF_MEMORY = "the device ran out of memory. To make a step smaller, cheapest first:"


def resume_command(run: RunDir, ranks: Ranks) -> str:
    """What goes on with a run on as many processes as there are now."""
    if ranks.size == 1:
        return f"fastbrain resume {run.path}"
    machines, here = -(-ranks.size // ranks.local_size), ranks.local_size
    where = f"--nproc-per-node {here}" if machines == 1 else f"... --nproc-per-node {here}"
    return f"torchrun {where} -m fastbrain resume {run.path}"


def conclude(
    run: RunDir,
    ranks: Ranks,
    summary: Mapping[str, Any],
    counts: ParameterCounts,
    say: Callable[[str], object],
) -> None:
    """Draw the loss curves and say where everything is.

    Args:
        run: the run.
        ranks: its processes.
        summary: of `Trainer.summary`.
        counts: of the model.
        say: takes lines.
    """
    picture = run.path / "loss.png"
    missing: str | None
    try:
        missing = chart.draw(metrics.read(run.metrics), picture, f"{run.path.name}: {counts}")
    except Io as error:
        missing = str(error)
    ended = summary["step"] == summary["steps"]
    say("")
    say(
        f"{'done' if ended else 'stopped'}: {summary['step']} of {summary['steps']} steps, "
        f"{summary['tokens']:,} tokens, {short_time(summary['time_s'])} since this start"
    )
    if summary["loss"] is not None:
        say(f"  training loss  {summary['loss']:.4f}")
    if summary["val_loss"] is not None and summary["best_step"] is not None:
        say(
            f"  held-out loss  {summary['val_loss']:.4f}, the best "
            f"{summary['best_val_loss']:.4f} at step {summary['best_step']}"
        )
    say(f"  checkpoint     {summary['checkpoint']}")
    say(f"  samples        {run.samples}")
    say(f"  loss curve     {picture}" if missing is None else f"  {missing}")
    if not ended:
        say(f"  go on with     {resume_command(run, ranks)}")


def remedies(settings: Settings) -> list[str]:
    """The ways out when the first step does not fit, each with what it would save."""
    train = settings.train
    micro = int(train.micro_batch_size)
    try:
        found = planned(
            settings.config(settings.model["vocab_size"]),
            THIS_MACHINE,
            micro,
            settings.data.seq_len,
            mixed_precision=train.precision == "bf16-mixed",
            accumulate=train.global_batch_size // micro,
        )
    except FastBrainError:
        return []  # not a card that can be planned for
    return [f"  {number}. {each}" for number, each in enumerate(found, start=1)]
