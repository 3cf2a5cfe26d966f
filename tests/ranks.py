"""Calling a function in several processes at once, as torchrun would start them."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


class Rank(NamedTuple):
    """What became of one process: exit code (None: hung), what the function returned, output."""

    code: int | None
    result: Any
    out: str
    err: str


def together(
    function: str,
    *arguments: Any,
    ranks: int = 2,
    cwd: Path | None = None,
    seconds: float = 60,
    environment: Mapping[str, str] | None = None,
) -> list[Rank]:
    """Call `module:function` of the tests in so many ranks; arguments and result are JSON values.

    A whole number that it returns becomes the exit code. Ranks that take longer than `seconds` are
    killed.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    job = {
        "function": function,
        "arguments": arguments,
        "ranks": ranks,
        "cwd": str(cwd or Path.cwd()),
        "seconds": seconds,
        "environment": dict(environment or {}),
        "path": [str(Path(__file__).parent)],
    }
    server.stdin.write(json.dumps(job) + "\n")
    server.stdin.flush()
    return [Rank(**each) for each in json.loads(server.stdout.readline())]


def results(function: str, *arguments: Any, **options: Any) -> list[Any]:
    """What the function returned in every rank, all of which must have ended well."""
    found = together(function, *arguments, **options)
    assert [each.code for each in found] == [0] * len(found), "\n".join(each.err for each in found)
    return [each.result for each in found]


@cache
def _server() -> subprocess.Popen[str]:
    # it ends with this process, when nobody has its input open any more
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", Path(__file__).with_name("rank_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
    )
