"""A whole training step: clear, forward, backward, clip, update.

At toy shapes on a CPU it keeps the comparison from rotting and shows the cost of Python and
dispatch. Figures worth quoting come from `python -m bench.training_step`, which interleaves the
contenders.
"""

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench import timing
from bench.contenders import Contender, random_ids
from bench.line_up import TRAINEES
from bench.shapes import CARD, TOY

NAMES = {trainee.name: trainee for trainee in TRAINEES}
CASES = [
    timing.row(f"training step {shape} {precision}", name, shape, precision, name)
    for shape in TOY
    for precision in ("fp32", "bf16")
    for name in NAMES
]


@pytest.mark.filterwarnings(
    "ignore:.*BF16:UserWarning",
    # torch.compile looks at what a graph break hands over
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
@pytest.mark.parametrize(("shape", "precision", "name"), CASES)
def bench_training_step(benchmark: BenchmarkFixture, shape: str, precision: str, name: str) -> None:
    missing = NAMES[name].missing(timing.DEVICE)
    if missing:
        pytest.skip(missing)
    chosen = (CARD if timing.DEVICE.type == "cuda" else TOY)[shape]
    torch.compiler.reset()
    benchmark.extra_info["tokens"] = chosen.tokens
    with timing.where_there_is_room():
        contender = Contender(NAMES[name](chosen, timing.DEVICE), precision)
        contender.use()
        ids = next(random_ids(chosen))
        loss = timing.timed(benchmark, lambda: contender.step(ids))
    assert loss.isfinite()
