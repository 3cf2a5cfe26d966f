"""Greedy generation with a key-value cache, for one prompt and for several, against Hugging Face.

Both models of a dense shape have the same weights, and say the same.
"""

from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench import peers, timing
from bench.shapes import CARD, TOY, TrainingShape
from fastbrain import Sampler, TransformerLm

ON_CARD = timing.DEVICE.type == "cuda"
PROMPT, NEW = (128, 128) if ON_CARD else (16, 16)
CASES = [
    timing.row(f"generate {shape} {prompts} at once", name, shape, prompts, name)
    for shape in TOY
    for prompts in (1, 8)
    for name in ("fastbrain", "Hugging Face")
]


@pytest.mark.parametrize(("shape", "prompts", "name"), CASES)
def bench_generate(benchmark: BenchmarkFixture, shape: str, prompts: int, name: str) -> None:
    if name == "Hugging Face" and not peers.available():
        pytest.skip(peers.MISSING)
    chosen = (CARD if ON_CARD else TOY)[shape]
    benchmark.extra_info["tokens"] = prompts * NEW
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(chosen.config.vocab_size, (prompts, PROMPT), generator=generator)
    with timing.where_there_is_room():
        lm = TransformerLm(chosen.config, seed=0)
        if ON_CARD:
            lm.to_cuda()
        say = _ours(lm, ids) if name == "fastbrain" else _hugging_face(lm, chosen, ids)
        said = timing.timed(benchmark, say)
    assert [len(each) for each in said] == [NEW] * prompts
    if shape == "dense" and not ON_CARD:
        assert said == _ours(lm, ids)()


def _ours(lm: TransformerLm, ids: torch.Tensor) -> Any:
    greedy, prompts = Sampler.greedy(), ids.tolist()
    if len(prompts) == 1:
        return lambda: [lm.generate(prompts[0], NEW, greedy)]
    return lambda: lm.generate_batch(prompts, NEW, greedy)


def _hugging_face(lm: TransformerLm, shape: TrainingShape, ids: torch.Tensor) -> Any:
    from transformers import GenerationConfig

    model = peers.causal_model(shape).to(timing.DEVICE).eval()
    if not shape.config.moe_layers:
        own = model.state_dict()
        weights = {name: w.view(own[name].shape) for name, w in lm.weights()}
        model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    if ON_CARD:
        model.bfloat16()
    # no token ends a text, and so as many are made as were asked for
    greedy = GenerationConfig(
        max_new_tokens=NEW, do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0
    )
    given = ids.to(timing.DEVICE)

    def say() -> list[list[int]]:
        out = model.generate(given, attention_mask=torch.ones_like(given), generation_config=greedy)
        found: list[list[int]] = out[:, PROMPT:].tolist()
        return found

    return say
