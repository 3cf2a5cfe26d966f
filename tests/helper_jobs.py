"""What ranks do in tests of what they say to each other."""

import math

import torch
from agreement_jobs import meeting

from fastbrain.parallel.launch import Launch
from fastbrain.parallel.ranks import RankLost, Ranks, hearing
from fastbrain.training.exchange import Wishes, exchanged


def exchange() -> dict:
    """Two micro-batches each, the last of all not a number; the last rank wants to stop."""
    with meeting() as ranks:
        places = [2 * ranks.rank, 2 * ranks.rank + 1]
        losses = [torch.tensor(0.1 + place) for place in places]
        if ranks.rank == ranks.size - 1:
            losses[1] = torch.tensor(math.nan)
        auxiliaries = [torch.tensor(0.01 * place) for place in places]
        wishes = Wishes(ranks.rank == ranks.size - 1, False, (ranks.rank + 1) * 2**20)
        found = exchanged(ranks, losses, auxiliaries, wishes)
        return {
            "losses": ["nan" if x != x else x for x in found.losses.tolist()],
            "auxiliaries": found.auxiliaries.tolist(),
            "wishes": list(Wishes.of(found.wishes.tolist())),
        }


# what JSON may hold, floats that decimal digits hardly can
TOLD = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, math.nan, math.inf, 2**60 + 1, None]
TOLD += [True, "a word, \u00e4 and \u4e2d", [], {"a": [1, {"b": None}]}]


def helpers() -> dict:
    """Everything that a rank can say to the others."""
    with meeting() as ranks:
        called = []

        def work():
            called.append(ranks.rank)
            return TOLD

        told = ranks.first(work)
        mine = float(ranks.rank + 1)
        before = torch.tensor([mine, 1.0])
        after = ranks.sum(before)
        ranks.barrier()
        return {
            "called": called,
            "told": [x.hex() if isinstance(x, float) else x for x in told],
            "empty": ranks.first(lambda: None),
            "add": ranks.add(
                [mine, 0.1 if ranks.leads else 0.2, (2.0**53 - 1) * (ranks.rank == 1)]
            ),
            "nan": str(ranks.add([math.nan if ranks.rank == 1 else 1.0])[0]),
            "lowest": ranks.lowest(7 - ranks.rank),
            "highest": ranks.highest(2**40 + ranks.rank),
            "sum": after.tolist(),
            "in place": after is before,
            "leads": ranks.leads,
            "where": [ranks.rank, ranks.size, ranks.local_size, ranks.device.type],
        }


def missing(how: str) -> str:
    """The last rank goes away; what the others hear at their next meeting."""
    ranks = Ranks.join(Launch.find())
    ranks.barrier()
    if ranks.rank == ranks.size - 1:
        return "gone"
    try:
        if how == "first":
            ranks.first(lambda: 1 / (ranks.rank + 1))
        elif how == "add":
            ranks.add([1.0])
        elif how == "sum":
            ranks.sum(torch.ones(1))
        else:
            with hearing(ranks):
                torch.distributed.all_reduce(torch.ones(1), group=ranks.group)
    except RankLost as error:
        return str(error)
    return "nothing"
