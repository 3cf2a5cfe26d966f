"""The figures of a measurement's JSON object, as a reader wants them: on one line."""

from typing import Any

_MIB = 2**20


def line(document: dict[str, Any]) -> str:
    """The figures of a document on one line; a second one of what is predicted of ranks."""
    parameters, rate, tflops = document["parameters"], document["tokens_per_s"], document["tflops"]
    memory = document["memory"]
    mfu = "unknown" if document["mfu"] is None else f"{document['mfu']:6.1%}"
    peak = f"peak {mib(memory['peak_bytes'])}"
    if "device_peak_bytes" in memory:
        peak += f" (device {mib(memory['device_peak_bytes'])})"
    measured = "  ".join(
        (
            f"{document['label']:30}",
            f"{parameters['total'] / 1e6:5.1f}M tot",
            f"{parameters['active'] / 1e6:5.1f}M act",
            f"{_rate(rate['median']):>7} tok/s ({_rate(rate['lowest'])}-{_rate(rate['highest'])})",
            f"{tflops:6.2f} TFLOPS" if tflops >= 0.1 else f"{tflops:6.4f} TFLOPS",
            f"MFU {mfu}",
            peak,
            f"{document['days']:5.1f} days for {short_count(document['tokens'])}",
        )
    )
    together = document["predicted_ranks"]
    return measured if together is None else f"{measured}\n{_ranks(together, document['tokens'])}"


def _ranks(found: dict[str, Any], tokens: int) -> str:
    return (
        f"  predicted, {found['ranks']} ranks by {found['parallel']} over "
        f"{found['link']['name']}: {mib(found['needed_bytes'])} a rank  communication "
        f"{found['communication_ms']:.1f} ms a step, {found['exposed_ms']:.1f} of them waited for  "
        f"{_rate(found['tokens_per_s'])} tok/s of all  {found['days']:.1f} days for "
        f"{short_count(tokens)}"
    )


def mib(count: int | None) -> str:
    """Bytes as whole MiB."""
    if count is None:
        return "unknown"
    return f"{round(count / _MIB)} MiB"


def short_count(count: int) -> str:
    """A count of tokens in few characters, such as 50B or 3.5B."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.6g}{unit}"
    return str(count)


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.1f}"
