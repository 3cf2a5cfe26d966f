"""One line of `fastbrain doctor`: what was looked at, what was found, and what to do about it."""

import subprocess
from collections.abc import Callable
from typing import Literal, NamedTuple

State = Literal["ok", "warning", "problem"]


class Check(NamedTuple):
    """A finding.

    Attributes:
        name: what was looked at.
        value: what was found.
        state: "warning" where a run would be slower or less safe, "problem" where there could be
            none.
        advice: what to do about it, or what it means; may be empty.
    """

    name: str
    value: str
    state: State = "ok"
    advice: str = ""


def gigabytes(count: int) -> str:
    """Bytes in GB."""
    return f"{count / 1e9:.1f} GB"


def output_of(*command: str) -> str | None:
    """What a program prints; None where it is missing, fails, or takes more than ten seconds."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def safely(name: str, look: Callable[[], Check]) -> Check:
    """A finding, or that it cannot be had: what is broken must not hide all else."""
    try:
        return look()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return Check(name, "cannot be examined", "problem", reason)
