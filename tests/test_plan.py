"""The planner's numbers against what they must add up to, and its answers to bad questions."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from bench.shapes import CARD
from fastbrain.config import LoraConfig, TransformerConfig
from fastbrain.errors import InvalidConfig, SequenceTooLong
from fastbrain.plan import CARDS, find_card, known_card, plan, remedies
from fastbrain.plan.shares import attention_share, expert_share, simulated

CHAPTER = CARD["moe"].config
DENSE = TransformerConfig(moe_layers=())


def test_counts_are_the_configurations():
    found = plan(CHAPTER).counts
    assert (found.total, found.active) == (340_952_064, 199_394_304)
    assert plan(CHAPTER).recommended_tokens == 20 * 199_394_304


def test_the_parts_of_the_peak_add_up_to_it():
    for config in (CHAPTER, DENSE):
        for batch in (1, 8):
            memory = plan(config, batch=batch).memory
            assert sum(memory.parts.values()) == memory.peak_bytes
            assert all(size > 0 for size in memory.parts.values())


def test_the_parts_of_the_step_add_up_to_it():
    found = plan(CHAPTER)
    assert sum(found.ms_by_part().values()) == pytest.approx(found.step_ms)
    assert found.tokens_per_s == pytest.approx(8 * 1024 / found.step_ms * 1e3)
    assert found.days(50e9) == pytest.approx(50e9 / found.tokens_per_s / 86_400)


def test_a_step_is_no_faster_than_the_cards_peak():
    for card in CARDS:
        for config in (CHAPTER, DENSE):
            assert 0 < plan(config, card, seq=512).mfu < 1


def test_more_tokens_take_longer_and_more_memory():
    base = plan(CHAPTER, batch=4, seq=512)
    for other in (plan(CHAPTER, batch=8, seq=512), plan(CHAPTER, batch=4, seq=1024)):
        assert other.step_ms > 1.5 * base.step_ms
        assert other.memory.activation_bytes >= 1.9 * base.memory.activation_bytes


def test_accumulation_repeats_all_but_the_update():
    once, four = plan(CHAPTER), plan(CHAPTER, accumulate=4)
    assert four.tokens == 4 * once.tokens
    assert 3.5 * once.step_ms < four.step_ms < 4 * once.step_ms
    # gradients are kept from one micro-batch to the next
    assert four.memory.parts["gradients"] == 4 * CHAPTER.parameter_counts().total


def test_other_cards_keep_a_part_of_the_home_cards_shares():
    def attention_ms(card):
        return plan(DENSE, card).ms_by_part()["attention"] * CARDS[card].tensor_flops

    home = attention_ms("rtx3060")
    assert attention_ms("rtx4090") == pytest.approx(home)
    for name in ("a100", "h100", "h200"):
        assert attention_ms(name) == pytest.approx(home / CARDS[name].kernel_share)


def test_a_small_step_waits_for_the_host():
    small = plan(replace(DENSE, n_layers=4), "h200", batch=1, seq=64)
    launches = sum(each.operation.launches for each in small.operations)
    assert small.host_bound
    assert small.step_ms == pytest.approx(launches * 12e-3)
    assert not plan(CHAPTER).host_bound


def test_a_card_needs_more_than_the_allocators_peak():
    memory = plan(DENSE).memory
    assert memory.needed_bytes - memory.peak_bytes == memory.outside_bytes == 450 * 2**20


def test_the_largest_micro_batch_fits_and_one_more_does_not():
    found = plan(CHAPTER)
    for mib in (8_000, 12_000, 40_000):
        rows = found.largest_micro_batch(mib * 2**20)
        needs = [
            plan(CHAPTER, batch=each, accumulate=2).memory.needed_bytes for each in (rows, rows + 1)
        ]
        assert needs[0] <= mib * 2**20 < needs[1]
    assert found.largest_micro_batch(2**30) == 0
    unknown = replace(found.card, memory_bytes=0)
    assert plan(CHAPTER, unknown).largest_micro_batch() is None


def test_mixed_precision_halves_what_activations_take():
    narrow, wide = (plan(DENSE, mixed_precision=bf16) for bf16 in (True, False))
    assert 0.5 < narrow.memory.activation_bytes / wide.memory.activation_bytes < 0.65
    assert wide.step_ms > 1.5 * narrow.step_ms
    assert "shadow weights" not in wide.memory.parts


def test_the_shape_decides_whether_it_fits():
    assert plan(CHAPTER, batch=8).fits
    assert not plan(CHAPTER, batch=16).fits
    assert plan(CHAPTER, "rtx3090", batch=16).fits


def test_remedies_are_the_six_in_order_with_what_they_save():
    found = remedies(CHAPTER, "rtx3060", 8, 1024, mixed_precision=False)
    words = ("micro-batch", "mixed precision", "tokens", "key-value", "experts", "layers")
    for remedy, word in zip(found, words, strict=True):
        assert word in remedy.text
        assert remedy.saved_bytes > 0
    peak = plan(CHAPTER, batch=8, mixed_precision=False).memory.peak_bytes
    half = plan(CHAPTER, batch=4, mixed_precision=False, accumulate=2).memory.peak_bytes
    assert found[0].saved_bytes == peak - half
    narrow = plan(CHAPTER, batch=8, mixed_precision=True).memory.peak_bytes
    assert found[1].saved_bytes == peak - narrow


def test_a_remedy_that_is_used_up_says_so():
    dense = replace(DENSE, n_layers=1, n_kv_heads=1)
    found = remedies(dense, "rtx3060", 1, 1024, mixed_precision=True)
    assert [bool(remedy.saved_bytes) for remedy in found] == [
        False,
        False,
        True,
        False,
        False,
        False,
    ]
    assert "saves nothing" in str(found[0])
    assert "already" in str(found[1])


def test_cards_are_found_by_key_and_by_device_name():
    assert find_card("RTX 3060").key == "rtx3060"
    assert known_card("NVIDIA GeForce RTX 3060").key == "rtx3060"
    assert known_card("NVIDIA H100 80GB HBM3").key == "h100"
    assert known_card("NVIDIA GeForce RTX 4060 Ti").key == "rtx4060ti"
    for other in ("NVIDIA GeForce RTX 3060 Ti", "NVIDIA H100 PCIe", "Radeon"):
        assert known_card(other) is None


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"card": "rtx9999"}, InvalidConfig, "rtx3060, rtx3090"),
        ({"batch": 0}, InvalidConfig, "batch must be a whole number above 0, got 0"),
        ({"seq": 1.5}, InvalidConfig, "seq must be a whole number above 0, got 1.5"),
        ({"accumulate": True}, InvalidConfig, "accumulate must be a whole number"),
        ({"config": replace(DENSE, n_layers=10_001)}, InvalidConfig, "n_layers must be at most"),
        (
            {"config": replace(DENSE, lora=LoraConfig(8))},
            InvalidConfig,
            "a plan is of training whole",
        ),
        ({"seq": 2048}, SequenceTooLong, "max_seq_len of 1024"),
    ],
)
def test_bad_questions_are_answered(arguments, error, words):
    with pytest.raises(error, match=words):
        plan(**{"config": CHAPTER} | arguments)


def test_shares_lie_between_their_neighbors():
    for direction in ("forward", "backward"):
        low, middle, high = (attention_share(direction, True, 64, seq) for seq in (512, 700, 1024))
        assert low < middle < high < 1
        # beyond the table its ends hold
        ends = [attention_share(direction, True, 64, seq) for seq in (8192, 100_000)]
        assert ends[0] == ends[1]
    assert 0.5 < expert_share("experts.hidden", True, 512) < 1


def test_a_width_without_kernels_pays_for_the_next_one():
    next_one = attention_share("forward", True, 64, 1024)
    assert attention_share("forward", True, 48, 1024) == pytest.approx(next_one * 48 / 64)


def test_the_simulated_shares_are_of_the_home_card():
    card = simulated()["card"]
    home = CARDS["rtx3060"]
    assert (card["sms"], card["bf16_flops"]) == (home.sms, home.tensor_flops)
    assert card["fp32_flops"] == home.fp32_flops


def test_a_named_card_is_planned_without_torch():
    program = (
        "import json, sys; from fastbrain.plan import plan\n"
        "from fastbrain.config import TransformerConfig\n"
        "plan(TransformerConfig()); print(json.dumps('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) is False


def test_this_machine_is_measured():
    card = find_card("this machine")
    assert card.tensor_flops > 1e9
    assert card.bytes_per_s > 1e8
    assert card.memory_bytes > 2**28
    assert plan(DENSE, card, batch=1, seq=64).step_ms > 0
