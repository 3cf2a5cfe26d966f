"""A whole training step at toy shapes: clear, forward, backward, clip, update.

This keeps the comparison from rotting and shows the cost of Python and dispatch; figures worth
quoting come from `python -m bench.training_step`, which interleaves the contenders.
"""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench import peers
from bench.contenders import Contender, Ours, random_ids
from bench.shapes import TOY

CASES = [
    pytest.param(shape, precision, side, id=f"{shape}-{precision}-{side}")
    for shape in TOY
    for precision in ("fp32", "bf16")
    for side in ("ours", "peer")
]


@pytest.mark.filterwarnings("ignore:.*BF16:UserWarning")
@pytest.mark.parametrize(("shape", "precision", "side"), CASES)
def bench_training_step(benchmark: BenchmarkFixture, shape: str, precision: str, side: str) -> None:
    if side == "peer" and not peers.available():
        pytest.skip(peers.MISSING)
    trainee = Ours(TOY[shape]) if side == "ours" else peers.Peer(TOY[shape])
    contender = Contender(trainee, precision)
    contender.use()
    ids = next(random_ids(TOY[shape]))
    benchmark.extra_info["tokens"] = TOY[shape].tokens
    benchmark.extra_info["parameters"] = trainee.parameters()
    loss = benchmark(contender.step, ids)
    assert loss.isfinite()
