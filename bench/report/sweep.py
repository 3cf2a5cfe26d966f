"""Tables of `python -m fastbrain.sweep_arch --table FILE`."""

from collections.abc import Iterator, Mapping
from typing import Any

from bench import published
from bench.report import shapes
from bench.report.markdown import bullets, number, page, table
from bench.report.results import MeasuredStep, Result
from fastbrain.config import TransformerConfig

KIND = "sweep"

_MIB = 2**20
_HEADER = (
    "model", "batch", "operands", "tokens/s, median", "lowest to highest", "days for 50B",
    "TFLOPS", "MFU %", "peak MiB", "device peak MiB", "PREDICTED tokens/s", "PREDICTED peak MiB",
)  # fmt: skip


def machine(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the rows say of where they were measured.

    Raises:
        ValueError: they were measured on more than one device.
    """
    found = [
        {
            "device": result["device"]["name"],
            "threads": result["device"]["threads"],
            "driver": (result["gpu"] or {}).get("driver"),
            "torch": result["versions"]["torch"],
            "triton": result["versions"]["triton"],
            "python": result["versions"]["python"],
        }
        for result in _results(body)
    ]
    if any(each != found[0] for each in found):
        raise ValueError("its rows are of more than one device or version")
    return found[0] if found else {}


def render(result: Result) -> str:
    """One row per shape, those that failed included, and what speaks against a figure."""
    rows, notes = [], []
    for row in result.body["rows"]:
        found = row["result"]
        if found is None:
            rows.append([row["arguments"], f"failed: {row['failure']}", *[""] * (len(_HEADER) - 2)])
            continue
        rows.append(_row(found))
        notes += [f"{' '.join(rows[-1][:2])}: {text}" for text in found["warnings"]]
    return page([table(_HEADER, rows), bullets(dict.fromkeys(notes))]).rstrip("\n")


def steps(result: Result) -> list[MeasuredStep]:
    """Every shape that was measured with BF16 operands."""
    return [
        MeasuredStep(
            result.device,
            _config(found),
            found["batch"],
            found["seq"],
            found["tokens_per_s"]["median"],
            found["memory"]["peak_bytes"],
        )
        for found in _results(result.body)
        if found["mixed_precision"]
    ]


def _results(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (row["result"] for row in body["rows"] if row["result"] is not None)


def _row(found: Mapping[str, Any]) -> list[str]:
    rate, memory, mfu = found["tokens_per_s"], found["memory"], found["mfu"]
    return [
        shapes.model(_config(found)),
        shapes.batch(found["batch"], found["seq"]),
        "BF16" if found["mixed_precision"] else "FP32",
        number(rate["median"]),
        f"{number(rate['lowest'])} to {number(rate['highest'])}",
        number(published.days(rate["median"]), 1),
        f"{found['tflops']:.4g}",
        number(None if mfu is None else 100 * mfu, 1),
        _mib(memory["peak_bytes"]),
        _mib(memory.get("device_peak_bytes")),
        number(found["prediction"]["tokens_per_s"]),
        _mib(found["prediction"]["peak_bytes"]),
    ]


def _config(found: Mapping[str, Any]) -> TransformerConfig:
    # a rule of rotation is an object of its own, and costs nothing
    return TransformerConfig(**{**found["config"], "rope_scaling": None})


def _mib(count: float | None) -> str:
    return number(None if count is None else count / _MIB)
