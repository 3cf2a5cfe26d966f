"""Names of tensors in a message: a few of them, and how many more there are."""

from collections.abc import Sequence


def listed(what: str, names: Sequence[str]) -> list[str]:
    """`what`, with their number for its `{}`, and up to five of these names; nothing for none."""
    if not names:
        return []
    # what a terminal would obey is escaped
    shown = [ascii(name)[1:-1][:200] for name in names[:5]]
    more = [f"and {len(names) - 5} more"] if len(names) > 5 else []
    return [f"{what.format(len(names))}: {', '.join(shown + more)}"]
