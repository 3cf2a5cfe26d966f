"""Learning rates and parameter counts are the reference system's."""

import numpy as np
import pytest
from fixture_models import read_json

from fastbrain import Schedule, TransformerConfig, TransformerLm

SCHEDULES = read_json("tables/schedule.json")
COUNTS = read_json("tables/parameter_counts.json")


def test_rates_are_equal_as_fp32():
    # the cosine of one row lies within 0.02 units of the last place of a tie, where one C library
    # rounds up and exact rounding goes down
    apart = [
        units_apart(schedule_of(case).rate(step), rate)
        for case in SCHEDULES
        for step, rate in case["rates"]
    ]
    assert sum(apart) <= 1, f"{sum(n > 0 for n in apart)} of {len(apart)} rates differ"


def test_the_floor_is_a_tenth_unless_told():
    case = SCHEDULES[0]
    schedule = Schedule.warmup_cosine(case["peak"], case["warmup"], case["steps"])
    assert units_apart(schedule.rate(10**9), case["rates"][-1][1]) == 0


@pytest.mark.parametrize("case", COUNTS, ids=lambda case: case["printed"].split()[0])
def test_parameters_are_counted(case):
    config = config_of(case)
    for counts in (config.parameter_counts(), builder_of(case).parameter_counts()):
        assert (counts.total, counts.active) == (case["total"], case["active"])
        assert str(counts) == case["printed"]


def schedule_of(case):
    schedule = Schedule.warmup_cosine(case["peak"], case["warmup"], case["steps"])
    return schedule.floor(case["floor"])


def units_apart(rate, expected):
    """How many fp32 values lie between two rates of equal sign."""
    found, wanted = np.array([rate, expected], dtype=np.float32).view(np.int32).tolist()
    return abs(found - wanted)


def config_of(case):
    n_heads, n_kv_heads, head_dim = case["heads"]
    num_experts, experts_per_token = case["experts"]
    return TransformerConfig(
        vocab_size=case["vocab_size"],
        d_model=case["d_model"],
        n_layers=case["n_layers"],
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        d_ff=case["d_ff"],
        moe_d_ff=case["moe_d_ff"],
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        moe_layers=tuple(case["moe_layers"]),
        shared_expert=case["shared_expert"],
        tie_embeddings=case["tie_embeddings"],
    )


def builder_of(case):
    return (
        TransformerLm.builder()
        .vocab_size(case["vocab_size"])
        .d_model(case["d_model"])
        .n_layers(case["n_layers"])
        .heads(*case["heads"])
        .d_ff(case["d_ff"])
        .moe_d_ff(case["moe_d_ff"])
        .experts(*case["experts"])
        .moe_layers(case["moe_layers"])
        .shared_expert(case["shared_expert"])
        .tie_embeddings(case["tie_embeddings"])
    )
