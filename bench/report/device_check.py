"""Tables of `bench/device_check.sh`; the layout of its file is told in `bench.device_check`."""

from collections.abc import Iterator, Mapping
from typing import Any

from bench import published
from bench.report import operations, shapes
from bench.report.markdown import bullets, number, page, table
from bench.report.results import MeasuredStep, Result

KIND = "device check"

_MIB = 2**20
_PARTS = ("part", "status", "seconds", "of", "cases", "failed", "skipped", "not begun from")
_STEPS = (
    "step", "model", "batch", "tokens/s", "days for 50B", "slowest to fastest", "peak MiB",
    "PREDICTED tokens/s", "PREDICTED peak MiB",
)  # fmt: skip


def render(result: Result) -> str:
    """What passed and failed, then steps and operations where they were timed."""
    parts = result.body["parts"]
    found = [table(_PARTS, [_part(name, each) for name, each in parts.items()])]
    found += [bullets(_troubles(parts))]
    if timed := _cases(parts, "steps"):
        found += ["Whole training steps:"]
        found += [table(_STEPS, [_step(name, case) for name, case in timed.items()])]
    if timed := _cases(parts, "operations"):
        found += ["Operations:", operations.of_cases(timed)]
    return page(found).rstrip("\n")


def steps(result: Result) -> list[MeasuredStep]:
    """Ours of every step that was timed; only they have a prediction."""
    return [
        MeasuredStep(
            result.device,
            *shapes.parse(case["shape"]),
            case["tokens_per_s"],
            case["peak_bytes"],
        )
        for case in _cases(result.body["parts"], "steps").values()
        if "predicted_peak_bytes" in case
    ]


def _cases(parts: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The cases of a part that ran."""
    cases = parts.get(name, {"cases": {}})["cases"]
    return {n: case for n, case in cases.items() if "failed" not in case and "skipped" not in case}


def _part(name: str, each: Mapping[str, Any]) -> list[str]:
    cases = each["cases"].values()
    counts = [len(cases), *(sum(word in case for case in cases) for word in ("failed", "skipped"))]
    times = [number(each["seconds"], 1), number(each["budget_s"])]
    return [name, each["status"], *times, *map(str, counts), each.get("left_out", "")]


def _troubles(parts: Mapping[str, Any]) -> Iterator[str]:
    for name, each in parts.items():
        if "error" in each:
            yield f"{name}: {each['error'].splitlines()[0]}"
        for case, found in each["cases"].items():
            if "failed" in found:
                # a traceback ends in what happened
                yield f"{name}, {case} failed: {found['failed'].strip().splitlines()[-1][:300]}"


def _step(name: str, case: Mapping[str, Any]) -> list[str]:
    config, batch, seq = shapes.parse(case["shape"])
    rate = case["tokens_per_s"]
    return [
        name,
        shapes.model(config),
        shapes.batch(batch, seq),
        number(rate),
        number(published.days(rate), 1),
        f"{case['spread']:.3f}",
        number(case["peak_bytes"] / _MIB),
        number(case.get("predicted_tokens_per_s")),
        number(case["predicted_peak_bytes"] / _MIB) if "predicted_peak_bytes" in case else "",
    ]
