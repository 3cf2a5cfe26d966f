"""Generated ids and sampler picks are the reference system's, one for one."""

import pytest
from fixture_models import MODELS, Reference, read_json

from fastbrain import Sampler

SAMPLER = read_json("tables/sampler.json")


@pytest.fixture(scope="module", params=MODELS)
def reference(request):
    return Reference(request.param)


@pytest.fixture(scope="module")
def model(reference):
    return reference.trained(moments=False)


def sampler_of(settings):
    sampler = Sampler.temperature(settings["temperature"], settings["seed"])
    sampler = sampler.top_k(settings["top_k"]).top_p(settings["top_p"])
    return sampler.repetition_penalty(settings["repetition_penalty"])


def test_greedy_ids_are_equal(reference, model):
    expected = reference.expected["trained"]["greedy"]
    ids = model.generate(expected["prompt"], len(expected["ids"]), Sampler.greedy())
    assert list(ids) == expected["ids"]


def test_sampled_ids_are_equal(reference, model):
    expected = reference.expected["trained"]["sampled"]
    ids = model.generate(expected["prompt"], len(expected["ids"]), sampler_of(expected))
    assert list(ids) == expected["ids"]


def settings_id(case):
    names = ("temperature", "top_k", "top_p", "repetition_penalty")
    return "-".join(f"{case[name]:.3g}" for name in names)


@pytest.mark.parametrize("case", SAMPLER["cases"], ids=settings_id)
def test_picks_are_equal(case):
    sampler = sampler_of(case)
    picks = [sampler.pick(SAMPLER["logits"], SAMPLER["history"]) for _ in case["picks"]]
    assert picks == case["picks"]
