"""Plans of several ranks: what a shard holds, what is sent, what of it is waited for."""

import math
from dataclasses import replace

import pytest
import torch

from bench.shapes import CARD
from fastbrain.config import TransformerConfig
from fastbrain.errors import InvalidConfig
from fastbrain.plan import (
    CARDS,
    LINKS,
    Card,
    find_link,
    largest_micro_batch,
    memory,
    plan,
    remedies,
    training_step,
)
from fastbrain.plan.groups import block_group, root_group, shard_parameters
from fastbrain.plan.planning import EXPOSED
from fastbrain.transformer import Transformer

CHAPTER = CARD["moe"].config
DENSE = TransformerConfig(moe_layers=())
UNTIED = replace(DENSE, tie_embeddings=False)
HOME = CARDS["rtx3060"]
CPU = Card("cpu", "a CPU", 1, 0, 1e11, 1e11, 1e10, 2**34, product_share=1.0, is_cpu=True)
# every first dimension is a multiple of 8, so that shards are equal
EVEN = {"moe": CHAPTER, "dense": DENSE, "untied": UNTIED}
STATE = ("weights", "moments", "gradients")

every_config = pytest.mark.parametrize("config", EVEN.values(), ids=EVEN)


def blocks(config: TransformerConfig) -> list[int]:
    return [block_group(config, layer).parameters for layer in range(config.n_layers)]


@pytest.mark.parametrize(
    "config",
    [*EVEN.values(), replace(CHAPTER, shared_expert=False, num_experts=5)],
    ids=[*EVEN, "routed experts alone"],
)
def test_groups_are_the_parameters_of_the_module(config):
    with torch.device("meta"):
        module = Transformer(config)
    own = [sorted(tuple(p.shape) for p in block.parameters()) for block in module.blocks]
    assert own == [sorted(block_group(config, at).shapes) for at in range(config.n_layers)]
    outside = [p for name, p in module.named_parameters() if not name.startswith("blocks.")]
    assert sorted(tuple(p.shape) for p in outside) == sorted(root_group(config).shapes)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 16])
def test_a_shard_is_the_first_of_the_pieces_that_torch_cuts(ranks):
    config = replace(CHAPTER, vocab_size=101, num_experts=5)
    for group in (root_group(config), block_group(config, 0), block_group(config, 19)):
        first = sum(
            torch.empty(shape, device="meta").chunk(ranks)[0].numel() for shape in group.shapes
        )
        assert group.shard(ranks) == first


@every_config
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_weights_gradients_and_moments_are_divided_by_the_ranks(config, ranks):
    total = config.parameter_counts().total
    parts = memory(config, HOME, 8, 512, True, 2, ranks).parts
    assert [parts[name] * ranks for name in STATE] == [4 * total, 8 * total, 4 * total]
    assert "shadow weights" not in parts


def test_experts_that_do_not_divide_weigh_on_the_first_rank():
    """Eight experts on 16 ranks: half of the ranks keep one each, the others none."""
    experts = 15 * 8 * 3 * 512 * 1024
    rest = CHAPTER.parameter_counts().total - experts
    assert shard_parameters(CHAPTER, 16) > experts / 8 + rest / 16


@pytest.mark.parametrize("config", [DENSE, UNTIED], ids=["tied", "untied"])
def test_the_loss_finds_the_root_gathered_and_the_last_block_come(config):
    per_block, root = blocks(config), root_group(config).parameters
    table = config.vocab_size * config.d_model
    found = memory(config, HOME, 8, 512, True, 2, 4)
    assert found.moment == "loss"
    # the head has a shadow then
    assert found.parts["gathered weights"] == 4 * root + 2 * table + 4 * per_block[-1]
    assert "unsharded gradients" not in found.parts


def test_backward_holds_two_blocks_and_the_gradients_of_two():
    # with few tokens and few words the weights are all that counts
    config = replace(DENSE, vocab_size=512, d_model=1024)
    (block, *_), root = blocks(config), root_group(config).parameters
    found = memory(config, HOME, 1, 8, True, 2, 8)
    assert found.moment == f"backward in layer {config.n_layers - 2}"
    shadow = 2 * (block - 2 * config.d_model)
    assert found.parts["gathered weights"] == 4 * root + 8 * block + shadow
    head = 4 * (512 + 1) * 1024
    assert found.parts["unsharded gradients"] == head + 8 * block
    # in FP32 operands are the weights themselves
    without = memory(config, HOME, 1, 8, False, 2, 8).parts["gathered weights"]
    assert without == 4 * root + 8 * block


def test_without_accumulation_gradients_of_later_blocks_alone_are_there():
    config = replace(DENSE, vocab_size=512, d_model=1024)
    once = memory(config, HOME, 1, 8, True, 1, 8)
    layer = int(once.moment.rpartition(" ")[2])
    assert once.parts.get("gradients", 0) == 4 * sum(blocks(config)[layer + 1 :]) // 8


def test_the_end_of_backward_holds_the_roots_gradient_and_its_copy():
    config = replace(DENSE, vocab_size=500_000, n_layers=1)
    root = root_group(config).parameters
    found = memory(config, HOME, 1, 8, True, 1, 4)
    assert found.moment == "end of backward"
    assert found.parts["gathered weights"] == 4 * root
    assert found.parts["unsharded gradients"] == 8 * root


@every_config
@pytest.mark.parametrize("card", [HOME, CPU], ids=["card", "cpu"])
@pytest.mark.parametrize(("batch", "seq"), [(8, 512), (1, 8)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_more_ranks_need_less_memory_each(config, card, batch, seq, accumulate):
    found = [memory(config, card, batch, seq, True, accumulate, w) for w in (2, 4, 8, 32)]
    needs = [each.needed_bytes for each in found]
    assert needs == sorted(needs, reverse=True)
    assert len(set(needs)) == len(needs)
    for each in found:
        assert sum(each.parts.values()) == each.peak_bytes
        assert all(size > 0 for size in each.parts.values())


def test_more_ranks_leave_room_for_more_rows():
    whole, two, four = (
        largest_micro_batch(CHAPTER, HOME, 1024, True, 12 * 2**30, shards) for shards in (1, 2, 4)
    )
    assert whole < two < four
    assert memory(CHAPTER, HOME, four, 1024, True, 2, 4).needed_bytes <= 12 * 2**30
    made = plan(CHAPTER, ranks=4, parallel="fsdp")
    assert made.largest_micro_batch() == four
    assert plan(CHAPTER, ranks=4, parallel="ddp").largest_micro_batch() == whole


def test_a_replica_keeps_its_gradients_from_step_to_step():
    made = plan(CHAPTER, ranks=2, parallel="ddp")
    assert made.memory == plan(CHAPTER, accumulate=2).memory
    assert plan(CHAPTER, ranks=2, parallel="ddp", accumulate=3).memory == made.memory


@every_config
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_replicas_send_their_gradients_once_a_step(config, ranks):
    total = config.parameter_counts().total
    for accumulate in (1, 5):
        made = plan(config, ranks=ranks, parallel="ddp", seq=512, accumulate=accumulate)
        assert made.sent_bytes == 2 * (ranks - 1) * 4 * total // ranks
        assert made.communication_ms == pytest.approx(made.sent_bytes / made.link.gb_per_s / 1e6)


@every_config
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_shards_are_gathered_and_scattered_in_every_micro_batch(config, ranks):
    total, root = config.parameter_counts().total, root_group(config).parameters
    for accumulate in (1, 5):
        made = plan(config, ranks=ranks, parallel="fsdp", seq=512, accumulate=accumulate)
        one = (ranks - 1) * 4 * (2 * (total - root) + root + total) // ranks
        assert made.sent_bytes == accumulate * one


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_computing_hides_what_it_lasts_as_long_as(parallel):
    rates = [1e-3, 0.1, 1, 10, 100, 1e6]
    found = [plan(CHAPTER, ranks=4, parallel=parallel, link=rate) for rate in rates]
    waits = [each.communication.exposed_ms for each in found]
    assert waits == sorted(waits, reverse=True)
    for each in found:
        passes = each.compute_ms - each.ms_by_part()["optimizer"]
        hidden = each.communication.hidden_ms
        assert 0 <= hidden <= passes * (2 / 3 if parallel == "ddp" else 1) + 1e-6
        assert each.step_ms == each.compute_ms + each.communication.exposed_ms
    # at a snail's pace all that can be hidden is
    share = 2 / 3 if parallel == "ddp" else 1
    assert found[0].communication.hidden_ms == pytest.approx(passes * share, rel=0.02)
    assert found[-1].communication.exposed_ms < 1e-2


def test_an_all_reduce_hides_behind_the_last_micro_batch_alone():
    made = plan(CHAPTER, ranks=4, parallel="ddp", link=1e-3, accumulate=4)
    passes = made.compute_ms - made.ms_by_part()["optimizer"]
    assert made.communication.hidden_ms == pytest.approx(passes / 4 * 2 / 3, rel=0.02)


def test_ways_out_are_reckoned_from_shards():
    def peak(rows, micro_batches):
        return memory(CHAPTER, HOME, rows, 1024, True, micro_batches, 4).peak_bytes

    halved = remedies(CHAPTER, HOME, 16, 1024, mixed_precision=True, shards=4)[0]
    assert halved.saved_bytes == peak(16, 1) - peak(8, 2)


def test_what_comes_last_has_nothing_to_hide_behind():
    def seconds(size):
        return 1e3 * size / 100e9

    table, root = DENSE.vocab_size * DENSE.d_model, root_group(DENSE).parameters
    (block, *_) = blocks(DENSE)
    ddp = plan(DENSE, ranks=4, parallel="ddp", link=100)
    assert ddp.communication.exposed_ms == pytest.approx(seconds(2 * 3 / 4 * 4 * table))
    for accumulate in (1, 3):
        fsdp = plan(DENSE, ranks=4, parallel="fsdp", link=100, accumulate=accumulate)
        once = seconds(3 / 4 * 4 * (2 * root + 2 * block))
        assert fsdp.communication.exposed_ms == pytest.approx(accumulate * once)


def test_figures_count_all_ranks():
    one = plan(CHAPTER, accumulate=2)
    four = plan(CHAPTER, accumulate=2, ranks=4, parallel="ddp", link=1e6)
    assert four.tokens == 4 * one.tokens
    assert four.tokens_per_s == pytest.approx(4 * one.tokens_per_s, rel=1e-4)
    assert four.days(1e9) == pytest.approx(one.days(1e9) / 4, rel=1e-4)
    assert four.tflops == pytest.approx(4 * one.tflops, rel=1e-4)
    assert four.mfu == pytest.approx(one.mfu, rel=1e-4)
    assert four.efficiency == pytest.approx(1, rel=1e-4)
    for kind in ("ddp", "fsdp"):
        slow = plan(CHAPTER, accumulate=2, ranks=4, parallel=kind, link="ethernet1")
        assert slow.efficiency == pytest.approx(slow.tokens_per_s / (4 * one.tokens_per_s))
        assert slow.efficiency < 0.9


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_parts_of_the_step_add_up_to_it(parallel):
    made = plan(CHAPTER, ranks=4, parallel=parallel, link="ethernet10")
    parts = made.ms_by_part()
    assert sum(parts.values()) == pytest.approx(made.step_ms)
    assert parts[EXPOSED] == made.communication.exposed_ms > 0


def test_one_rank_is_what_it_was():
    made = plan(CHAPTER)
    assert made == plan(CHAPTER, ranks=1, parallel="fsdp", link="ethernet1")
    assert (made.parallel, made.link, made.communication) == (None, None, None)
    assert (made.communication_ms, made.sent_bytes, made.efficiency) == (0, 0, 1)
    assert made.step_ms == made.compute_ms == made.alone_ms
    assert EXPOSED not in made.ms_by_part()


def test_a_rank_updates_its_shard_and_copies_what_it_gathers():
    total = CHAPTER.parameter_counts().total
    whole, shard = (
        {op.name: op for op in training_step(CHAPTER, 8, 512, True, 3, shards)} for shards in (1, 4)
    )
    assert shard["Adam"].bytes == 28 * total / 4
    assert shard["gradient norm"].bytes == whole["gradient norm"].bytes / 4
    assert shard["adding gradients up"].bytes == whole["adding gradients up"].bytes / 4
    root = root_group(CHAPTER).parameters
    assert shard["copies of what is sent"].bytes == 3 * 8 * (3 * (total - root) + 2 * root)
    operands = [block_group(CHAPTER, layer).operands for layer in range(20)]
    table = CHAPTER.vocab_size * CHAPTER.d_model
    assert shard["casting gathered weights"].bytes == 3 * 6 * (2 * sum(operands) + table)
    fp32 = {op.name for op in training_step(CHAPTER, 8, 512, False, 3, 4)}
    assert "casting gathered weights" not in fp32
    assert set(shard) - set(whole) == {"copies of what is sent", "casting gathered weights"}


def test_replicas_are_chosen_where_they_fit_and_shards_beyond():
    needed = plan(CHAPTER, accumulate=2).memory.needed_bytes
    just = plan(CHAPTER, ranks=2, budget_bytes=needed)
    over = plan(CHAPTER, ranks=2, budget_bytes=needed - 1)
    assert (just.parallel, over.parallel) == ("ddp", "fsdp")
    mib = f"{needed / 2**20:,.0f}"
    assert just.choice.why == f"the whole model fits each rank: {mib} MiB of {mib}"
    assert over.choice.why == (
        f"the whole model would need {mib} MiB on each rank, which has {mib}"
    )
    assert plan(CHAPTER, ranks=2, batch=10).parallel == "fsdp"
    unknown = replace(HOME, memory_bytes=0)
    assert plan(CHAPTER, unknown, ranks=2).parallel == "ddp"
    for asked in ("ddp", "fsdp"):
        made = plan(CHAPTER, ranks=2, parallel=asked)
        assert (made.parallel, made.choice.why) == (asked, "as asked for")


@pytest.mark.parametrize(
    ("name", "key", "nominal"),
    [
        ("PCIe 3.0 x8", "pcie3x8", 7.877),
        ("pcie-4.0-x8", "pcie4x8", 15.754),
        ("pcie_4x16", "pcie4x16", 31.508),
        ("NVLink", "nvlink", 56.25),
        ("Ethernet 2.5", "ethernet2.5", 0.3125),
        ("ethernet100", "ethernet100", 12.5),
    ],
)
def test_links_have_their_names_and_rates(name, key, nominal):
    found = find_link(name)
    assert found is LINKS[key]
    assert found.nominal_gb_per_s == pytest.approx(nominal, rel=1e-4)


def test_every_link_says_what_of_it_is_assumed():
    for link in LINKS.values():
        assert 0 < link.efficiency < 1
        assert f"{link.efficiency:g} of it assumed" in link.source


def test_a_number_is_a_rate_as_it_is():
    for rate in (12.5, "12.5", 25 / 2):
        assert (find_link(rate).gb_per_s, find_link(rate).source) == (12.5, "as given")
    assert find_link(3).gb_per_s == 3


@pytest.mark.parametrize("name", ["pcie5x4", "", "0", "-3", "nan", "inf", 0, -1.0, math.inf, True])
def test_a_link_that_is_none_is_refused_with_those_there_are(name):
    with pytest.raises(InvalidConfig, match=r"is not known: choose among pcie3x8, .*, or give"):
        find_link(name)


def test_the_usual_link_is_a_boards_and_between_cpus_the_networks():
    assert plan(DENSE, ranks=2).link.key == "pcie4x8"
    assert plan(DENSE, CPU, ranks=2, seq=64).link.key == "ethernet1"
    assert plan(DENSE, ranks=2, link=find_link("nvlink")).link.key == "nvlink"


@pytest.mark.parametrize("ranks", [0, -1, 1.5, True, "2"])
def test_ranks_are_a_whole_number(ranks):
    with pytest.raises(InvalidConfig, match="ranks must be a whole number above 0, got"):
        plan(DENSE, ranks=ranks)


def test_another_way_to_share_is_refused():
    with pytest.raises(InvalidConfig, match='parallel must be "auto", "ddp" or "fsdp", got'):
        plan(DENSE, ranks=2, parallel="tensor")
