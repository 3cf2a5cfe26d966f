"""How the ranks of a run share it: replicas or parts of the model, and rows of every step."""

from fastbrain.errors import Cuda, InvalidConfig
from fastbrain.parallel.ranks import Ranks
from fastbrain.plan import Card, Choice, chosen, largest_micro_batch
from fastbrain.plan.machine import machine_bytes
from fastbrain.training.devices import CPU_TOKENS, CUDA_SHARE, CUDA_TOKENS, Device
from fastbrain.training.settings import Settings
from fastbrain.transformer import split_parameters


def choice(settings: Settings, device: Device, ranks: Ranks) -> Choice | None:
    """Replicas or parts, and why; None with one process.

    Args:
        settings: with the model's shape and the precision decided.
        device: of this rank; the rank with the least memory counts.
        ranks: of the run.
    """
    if ranks.size == 1:
        return None
    train, micro = settings.train, settings.train.micro_batch_size
    config = settings.config(settings.model["vocab_size"])
    rows = 1 if micro == "auto" else int(micro)
    budget = ranks.lowest(_budget(device, ranks))
    found, _ = chosen(
        config,
        _card(device),
        rows,
        settings.data.seq_len,
        train.precision == "bf16-mixed",
        max(train.global_batch_size // (rows * ranks.size), 1),
        ranks.size,
        train.parallel,
        budget,
        split_parameters(config)[1],
    )
    return found


def planned_micro_batch_size(settings: Settings, device: Device, ranks: Ranks) -> int:
    """How many rows a rank runs at once where the model is in parts: what the plan says will fit.

    To try it, as with a whole model, could end one rank in the middle of what all have to do.

    Raises:
        Cuda: not even one row fits.
    """
    rows, seq_len = settings.train.global_batch_size // ranks.size, settings.data.seq_len
    most = max((CUDA_TOKENS if device.is_cuda else CPU_TOKENS) // seq_len, 1)
    budget = ranks.lowest(_budget(device, ranks))
    if device.is_cuda:
        bf16 = settings.train.precision == "bf16-mixed"
        config = settings.config(settings.model["vocab_size"])
        fitting = largest_micro_batch(config, _card(device), seq_len, bf16, budget, ranks.size)
        if fitting == 0:
            raise Cuda(
                f"not even one row of {seq_len} tokens would fit into {device.name} with the model "
                f"in {ranks.size} parts: lower data.seq_len, start more processes, or build a "
                "smaller model"
            )
        most = min(most, fitting)
    return _largest_divisor(rows, most)


def require_split(settings: Settings, ranks: Ranks) -> None:
    """Refuse a step whose rows the ranks cannot share evenly, a micro-batch at a time.

    Raises:
        InvalidConfig: names the values nearby.
    """
    rows, micro = settings.train.global_batch_size, settings.train.micro_batch_size
    size = ranks.size
    at_once = size * (1 if micro == "auto" else int(micro))
    if rows % at_once == 0:
        return
    lower = rows // at_once * at_once
    near = f"{lower} and {lower + at_once}" if lower else f"{at_once}"
    if micro == "auto":
        raise InvalidConfig(
            f"train.global_batch_size must be a multiple of the number of processes, which is "
            f"{size}, got {rows}; nearest: {near}; or start a number of processes that divides it"
        )
    ways = f"nearest: {near}"
    if rows % size == 0:
        ways += f"; or train.micro_batch_size={_largest_divisor(rows // size, int(micro))}"
    raise InvalidConfig(
        f"train.global_batch_size must be a multiple of processes times train.micro_batch_size, "
        f"{size} x {micro} = {at_once}, got {rows}; {ways}"
    )


def split_anew(settings: Settings, then: Settings, ranks: Ranks) -> Settings:
    """The settings of a resumed run, its micro-batch lowered where the ranks have fewer rows each.

    One that is asked for now is left as it is.
    """
    rows, micro = settings.train.global_batch_size, int(settings.train.micro_batch_size)
    asked = micro != then.train.micro_batch_size
    if asked or rows % ranks.size or rows % (ranks.size * micro) == 0:
        return settings
    return settings.with_train(micro_batch_size=_largest_divisor(rows // ranks.size, micro))


def _largest_divisor(rows: int, most: int) -> int:
    return next(size for size in range(min(rows, most), 0, -1) if rows % size == 0)


def _budget(device: Device, ranks: Ranks) -> int:
    """Bytes that a step may take; 0 where it is unknown."""
    if device.total_bytes is not None:
        return int(CUDA_SHARE * device.total_bytes)
    return (machine_bytes() or 0) // ranks.local_size


def _card(device: Device) -> Card:
    """The device as a plan's memory takes it, which asks for no rate."""
    return Card("", device.name, 0, 0, 0, 0, 0, device.total_bytes or 0, is_cpu=not device.is_cuda)
