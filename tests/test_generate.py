"""Decoding with a cache is decoding without one; batches, stopping, and the limits."""

from dataclasses import replace

import pytest
import torch
from models import DENSE, MOE, SHAPES, model, random_ids

from fastbrain import (
    EmptyDataset,
    InvalidConfig,
    Sampler,
    SequenceTooLong,
    TokenOutOfRange,
)
from fastbrain.generate import Cache


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("pieces", [[9], [4, 1, 1, 3], [1] * 9], ids=["whole", "mixed", "single"])
def test_cached_logits_are_those_of_the_whole_sequence(config, pieces):
    module = model(config).module
    ids = random_ids(2, 9)
    cache, first = Cache(module, 2), 0
    for width in pieces:
        logits = cache.feed(ids[:, first : first + width].tolist())
        first += width
        expected = module(ids[:, :first])[:, -1]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "bf16"])
def test_greedy_generation_repeats_the_full_forward(config, mixed):
    lm = model(config)
    lm.module.mixed_precision = mixed
    prompt = random_ids(5).tolist()
    found = lm.generate(prompt, 12, Sampler.greedy())
    logits = lm.module(torch.tensor([prompt + found]))[0]
    if not mixed:  # rounding decides near-ties in BF16
        assert found == logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
    assert len(found) == 12


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_a_batch_of_uneven_prompts_is_each_prompt_alone(config):
    lm = model(config)
    prompts = [random_ids(n, seed=n).tolist() for n in (1, 7, 3, 7)]
    together = lm.generate_batch(prompts, 10, Sampler.greedy())
    assert together == [lm.generate(p, 10, Sampler.greedy()) for p in prompts]


def test_stop_ids_end_each_sequence_for_itself_and_are_included():
    lm = model(DENSE)
    prompts = [random_ids(4, seed=s).tolist() for s in range(3)]
    free = lm.generate_batch(prompts, 12, Sampler.greedy())
    stop = free[0][3]
    stopped = lm.generate_batch(prompts, 12, Sampler.greedy(), stop=(stop,))
    for whole, cut in zip(free, stopped, strict=True):
        end = whole.index(stop) + 1 if stop in whole else 12
        assert cut == whole[:end]
    assert lm.generate(prompts[0], 12, Sampler.greedy(), stop=(stop,)) == stopped[0]


def test_prompts_may_be_arrays_and_stop_one_id():
    lm = model(DENSE)
    prompt = random_ids(4)
    free = lm.generate(prompt.tolist(), 8, Sampler.greedy())
    assert lm.generate(prompt, 8, Sampler.greedy()) == free
    assert lm.generate_batch([prompt.numpy()], 8, Sampler.greedy()) == [free]
    end = free.index(free[2]) + 1
    assert lm.generate(prompt, 8, Sampler.greedy(), stop=free[2]) == free[:end]


def test_a_callback_sees_each_token_and_can_stop():
    lm, seen = model(DENSE), []

    def callback(token):
        seen.append(token)
        return len(seen) < 4

    found = lm.generate_with([1, 2], 20, Sampler.greedy(), callback)
    assert found == seen == lm.generate([1, 2], 4, Sampler.greedy())


def test_a_decoder_can_be_fed_between_tokens():
    lm = model(DENSE)
    decoder = lm.decoder()
    decoder.feed([3, 1])
    first = decoder.next(Sampler.greedy())
    decoder.feed([5])
    second = decoder.next(Sampler.greedy())
    decoder.feed([])
    assert decoder.history() == [3, 1, first, 5, second]
    assert [second] == lm.generate([3, 1, first, 5], 1, Sampler.greedy())


def test_a_seed_repeats_a_sample_and_filters_narrow_it():
    lm = model(MOE)
    runs = [lm.generate([1, 2], 20, Sampler.temperature(1.5, seed=s)) for s in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]
    likeliest = lm.generate([1, 2], 20, Sampler.greedy())
    for sampler in (Sampler.temperature(1.5, 3).top_k(1), Sampler.temperature(1.5, 3).top_p(0.0)):
        assert lm.generate([1, 2], 20, sampler) == likeliest


def test_the_last_position_can_be_filled_and_not_passed():
    lm = model(DENSE)
    prompt = random_ids(30).tolist()
    assert len(lm.generate(prompt, 3, Sampler.greedy())) == 3  # the last is sampled, never read
    with pytest.raises(SequenceTooLong, match=r"33 tokens.*max_seq_len of 32"):
        lm.generate(prompt, 4, Sampler.greedy())
    decoder = lm.decoder()
    decoder.feed(prompt)
    with pytest.raises(SequenceTooLong):
        decoder.feed([1, 2, 3])


def test_uneven_rows_fill_the_last_position_without_touching_another():
    module = model(replace(DENSE, max_seq_len=8)).module
    rows = [random_ids(8).tolist(), random_ids(3, seed=5).tolist()]
    logits = Cache(module, 2).feed(rows)
    for i, row in enumerate(rows):
        torch.testing.assert_close(logits[i], module(torch.tensor([row]))[0, -1])


def test_no_tokens_are_no_tokens():
    lm = model(DENSE)
    assert lm.generate([1], 0, Sampler.greedy()) == []
    assert lm.generate_batch([], 5, Sampler.greedy()) == []


def test_generation_leaves_gradients_and_weights_alone():
    lm = model(DENSE)
    before = [p.clone() for p in lm.module.parameters()]
    lm.generate([1, 2, 3], 5, Sampler.greedy())
    assert all(p.grad is None for p in lm.module.parameters())
    pairs = zip(before, lm.module.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


REFUSED = {
    "prompt 0 is empty": (InvalidConfig, lambda lm: lm.generate([], 3, Sampler.greedy())),
    "token id 37 is outside": (TokenOutOfRange, lambda lm: lm.generate([37], 3, Sampler.greedy())),
    "at least 0, got -1": (InvalidConfig, lambda lm: lm.generate([1], -1, Sampler.greedy())),
    "feed the prompt first": (InvalidConfig, lambda lm: lm.decoder().next(Sampler.greedy())),
    "prompt must be integers": (InvalidConfig, lambda lm: lm.generate([1.7], 3, Sampler.greedy())),
    "prompt 1 must be": (
        InvalidConfig,
        lambda lm: lm.generate_batch([[1], "12"], 3, Sampler.greedy()),
    ),
    "ids must be one row": (InvalidConfig, lambda lm: lm.decoder().feed([[1, 2]])),
    "whole number, got 1.5": (InvalidConfig, lambda lm: lm.generate([1], 1.5, Sampler.greedy())),
    "stop must be": (InvalidConfig, lambda lm: lm.generate([1], 2, Sampler.greedy(), stop=["a"])),
    "top_k must be at least 0.*1.5": (InvalidConfig, lambda lm: Sampler.greedy().top_k(1.5)),
    "no ids to feed": (EmptyDataset, lambda lm: Cache(lm.module, 1).feed([[]])),
    "temperature must be": (InvalidConfig, lambda lm: Sampler.temperature(float("nan"))),
    "top_k must be": (InvalidConfig, lambda lm: Sampler.greedy().top_k(-1)),
    "top_p must be": (InvalidConfig, lambda lm: Sampler.greedy().top_p(1.5)),
    "repetition_penalty must": (InvalidConfig, lambda lm: Sampler.greedy().repetition_penalty(0)),
    "at least one entry": (InvalidConfig, lambda lm: Sampler.greedy().pick([], [])),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_requests_are_refused_by_name(message):
    kind, call = REFUSED[message]
    with pytest.raises(kind, match=message):
        call(model(DENSE))
