"""The short table at the end of a check."""

from collections.abc import Iterator
from typing import Any


def text(document: dict[str, Any]) -> str:
    """Parts, then the fastest peer of every operation, then training steps."""
    parts = document["parts"]
    lines = [*_parts(parts), *_operations(parts), *_steps(parts)]
    return "\n".join(lines)


def _parts(parts: dict[str, Any]) -> Iterator[str]:
    yield f"{'part':14}{'result':13}{'seconds':>8}{'budget':>8}  cases"
    for name, part in parts.items():
        cases = part["cases"]
        failed = [case for case, found in cases.items() if "failed" in found]
        skipped = sum("skipped" in found for found in cases.values())
        notes = [f"{len(cases)} run"]
        if skipped:
            notes[0] = f"{len(cases) - skipped} run, {skipped} skipped"
        if failed:
            notes.append(
                f"{len(failed)} failed: {'; '.join(failed[:4])}" + " ..." * (len(failed) > 4)
            )
        if "left_out" in part:
            notes.append(f"no time from {part['left_out']!r} on (--budget 2 gives twice as much)")
        if "error" in part:
            notes.append(part["error"].splitlines()[0])
        row = f"{name:14}{part['status']:13}{part['seconds']:8.1f}{part['budget_s']:8.0f}"
        yield f"{row}  {'; '.join(notes)}"


def _operations(parts: dict[str, Any]) -> Iterator[str]:
    rows = _measured(parts, "operations", "ratio")
    if rows:
        yield f"\n{'operation':34}{'fused ms':>10}{'peer ms':>10}{'ratio':>7}  fastest peer"
    for name, row in rows.items():
        ours, theirs = row["ms"]["fused"], row["ms"][row["fastest_peer"]]
        yield f"{name:34}{ours:10.3f}{theirs:10.3f}{row['ratio']:7.2f}  {row['fastest_peer']}"


def _steps(parts: dict[str, Any]) -> Iterator[str]:
    rows = _measured(parts, "steps", "tokens_per_s")
    if rows:
        yield f"\n{'training step':38}{'tokens/s':>10}{'peak MiB':>10}{'predicted':>11}{'of it':>8}"
    for name, row in rows.items():
        line = f"{name:38}{row['tokens_per_s']:10,.0f}{row['peak_bytes'] / 2**20:10,.0f}"
        if "predicted_peak_bytes" in row:
            predicted = row["predicted_peak_bytes"]
            line += f"{predicted / 2**20:11,.0f}{row['peak_bytes'] / predicted:8.0%}"
        yield line


def _measured(parts: dict[str, Any], part: str, key: str) -> dict[str, Any]:
    """Rows of a part with a figure, which a dry run has none of."""
    cases = parts.get(part, {}).get("cases", {})
    return {name: row for name, row in cases.items() if row.get(key) is not None}
