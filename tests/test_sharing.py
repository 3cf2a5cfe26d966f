"""How ranks share a run is decided alike on all, and what they cannot share is refused."""

import dataclasses

import pytest
import torch

from fastbrain import Cuda, InvalidConfig
from fastbrain.parallel.launch import Launch
from fastbrain.parallel.ranks import Ranks
from fastbrain.training import sharing
from fastbrain.training.devices import Device
from fastbrain.training.settings import Settings

SHAPE = {
    "vocab_size": 1000, "d_model": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 8,
    "head_dim": 64, "d_ff": 1536, "moe_layers": [], "max_seq_len": 256,
}  # fmt: skip
GIB = 2**30


class Fake(Ranks):
    """One of several ranks that says what the others have, without any of them."""

    def __init__(self, size: int, others: int | None = None) -> None:
        super().__init__(Launch(world_size=size, local_world_size=size), torch.device("cpu"))
        self._others = others

    def lowest(self, value: int) -> int:
        return value if self._others is None else min(value, self._others)


def settings(rows: int = 16, micro: int | str = 4, **train) -> Settings:
    tables = {
        "model": SHAPE,
        "data": {"train": "corpus.bin", "seq_len": 256},
        "train": {"max_steps": 1, "global_batch_size": rows, "micro_batch_size": micro, **train},
    }
    found = Settings.from_tables(tables)
    return found.with_train(precision=train.get("precision", "bf16-mixed"))


def card(total_bytes: int) -> Device:
    cpu = Device.find(Ranks.alone())
    return dataclasses.replace(
        cpu, torch_device=torch.device("cuda", 0), name="a card", total_bytes=total_bytes
    )


def test_one_process_shares_nothing():
    assert sharing.choice(settings(), card(24 * GIB), Fake(1)) is None


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_what_is_asked_for_is_done(parallel):
    found = sharing.choice(settings(parallel=parallel), card(1), Fake(2))
    assert (found.parallel, found.why) == (parallel, "as asked for")


def test_a_model_that_fits_is_replicated_and_one_that_does_not_is_divided():
    roomy = sharing.choice(settings(), card(24 * GIB), Fake(2))
    assert roomy.parallel == "ddp"
    assert roomy.why.startswith("the whole model fits each rank: ")
    tight = sharing.choice(settings(), card(GIB // 4), Fake(2))
    assert tight.parallel == "fsdp"
    assert "the whole model would need" in tight.why
    # 92 % of a quarter of a GiB
    assert tight.why.endswith("MiB on each rank, which has 236")


def test_the_rank_with_the_least_memory_decides():
    found = sharing.choice(settings(), card(24 * GIB), Fake(2, others=GIB // 4))
    assert found.parallel == "fsdp"
    assert found == sharing.choice(settings(), card(24 * GIB), Fake(2, others=GIB // 4))


def test_frozen_weights_need_no_room_for_gradients_and_moments():
    budget = 1000 * 2**20
    whole = sharing.choice(settings(), card(budget), Fake(2))
    tables = settings().tables()
    tables["model"] |= {"lora": {"rank": 4}}
    tables["train"] |= {"init": "base.rbw"}
    adapted = Settings.from_tables(tables).with_train(precision="bf16-mixed")
    assert whole.parallel == "fsdp"
    assert sharing.choice(adapted, card(budget), Fake(2)).parallel == "ddp"


def test_parts_get_the_largest_micro_batch_that_fits_and_divides():
    auto = settings(rows=22, micro="auto")
    roomy = sharing.planned_micro_batch_size(auto, card(80 * GIB), Fake(2))
    assert roomy == 11
    # six rows would fit, and no more than one divides eleven
    assert sharing.planned_micro_batch_size(auto, card(80 * GIB), Fake(2, others=GIB)) == 1
    with pytest.raises(Cuda, match=r"not even one row of 256 tokens would fit into a card with"):
        sharing.planned_micro_batch_size(auto, card(80 * GIB), Fake(2, others=2**20))


@pytest.mark.parametrize(
    ("rows", "micro", "size", "said"),
    [
        (16, 4, 3, "3 x 4 = 12, got 16; nearest: 12 and 24"),
        (16, 16, 2, "2 x 16 = 32, got 16; nearest: 32; or train.micro_batch_size=8"),
        (24, 5, 2, "2 x 5 = 10, got 24; nearest: 20 and 30; or train.micro_batch_size=4"),
        (16, "auto", 3, "which is 3, got 16; nearest: 15 and 18; or start a number of processes"),
        (2, "auto", 4, "which is 4, got 2; nearest: 4; or start a number"),
    ],
)
def test_rows_that_cannot_be_shared_are_refused_with_those_nearby(rows, micro, size, said):
    found = settings(rows=12 if micro == "auto" else rows, micro="auto").with_train(
        global_batch_size=rows, micro_batch_size=micro
    )
    with pytest.raises(InvalidConfig) as refusal:
        sharing.require_split(found, Fake(size))
    assert str(refusal.value).startswith("train.global_batch_size must be a multiple of ")
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("rows", "micro", "size"), [(16, 4, 4), (16, 1, 16), (16, "auto", 2), (12, 2, 3), (7, 7, 1)]
)
def test_rows_that_can_be_shared_are_not(rows, micro, size):
    sharing.require_split(settings(rows=rows, micro=micro), Fake(size))


def test_a_resumed_run_lowers_its_micro_batch_to_what_each_rank_has():
    then = settings(rows=16, micro=16)
    assert sharing.split_anew(then, then, Fake(2)).train.micro_batch_size == 8
    assert sharing.split_anew(then, then, Fake(4)).train.micro_batch_size == 4
    six = settings(rows=12, micro=6)
    assert sharing.split_anew(six, six, Fake(3)).train.micro_batch_size == 4
    # no need, or no way, or the user's wish
    assert sharing.split_anew(then, then, Fake(1)) is then
    assert sharing.split_anew(then, then, Fake(3)) is then
    asked = then.with_train(micro_batch_size=4)
    assert sharing.split_anew(asked.with_train(micro_batch_size=16), asked, Fake(2)).train == (
        then.train
    )
