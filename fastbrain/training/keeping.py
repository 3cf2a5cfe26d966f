"""Which checkpoints stay after a commit, as a function of numbers alone."""

from collections.abc import Collection

# a run never deletes below this many intact ones, once it had them
FEWEST_INTACT = 2


def kept(
    intact: Collection[int],
    newest: int,
    best: int | None,
    keep: int,
    keep_every: int,
    way_back: int | None = None,
) -> set[int]:
    """The steps whose checkpoints stay, of those that are intact.

    Args:
        intact: steps with an intact checkpoint of this run.
        newest: the step just committed.
        best: the step with the lowest held-out loss.
        keep: so many of the others stay, the newest.
        keep_every: multiples of it stay for ever; 0 is none.
        way_back: a rollback may have to reload a checkpoint as old as this step, so the newest
            that is no later stays, and the oldest that is later: it takes that one's place when
            it is old enough.
    """
    steps = sorted(intact, reverse=True)
    protected = {
        step for step in steps if step in (newest, best) or (keep_every and step % keep_every == 0)
    }
    if way_back is not None:
        protected.update([step for step in steps if step <= way_back][:1])
        protected.update([step for step in steps if step > way_back][-1:])
    others = [step for step in steps if step not in protected]
    stay = protected | set(others[:keep])
    for step in steps:
        if len(stay) >= FEWEST_INTACT:
            break
        stay.add(step)
    return stay
