"""The planned peak of a step on the CPU against the resident set of a process that takes it."""

import subprocess
import sys

import pytest

from fastbrain.config import TransformerConfig
from fastbrain.plan import Card, plan

CPU = Card("cpu", "a CPU", 1, 0, 1e11, 1e11, 1e10, 2**34, product_share=1.0, is_cpu=True)
COMMON = {"vocab_size": 8192, "d_model": 256, "n_heads": 4, "n_kv_heads": 1, "max_seq_len": 512}
# mostly weights; mostly activations; both, with experts
CASES = {
    "dense-1x64": (TransformerConfig(n_layers=16, d_ff=2816, moe_layers=(), **COMMON), 1, 64),
    "dense-8x512": (TransformerConfig(n_layers=4, d_ff=704, moe_layers=(), **COMMON), 8, 512),
    "moe-8x256": (
        TransformerConfig(n_layers=6, d_ff=704, moe_d_ff=176, moe_layers=(2, 3, 4, 5), **COMMON),
        8,
        256,
    ),
}
PROGRAM = """
import sys, torch
from fastbrain import TokenBatch, TransformerConfig, TransformerLm

config = TransformerConfig(**{config})
model = TransformerLm(config, seed=1, mixed_precision=False)
ids = torch.randint(config.vocab_size, ({batch}, {seq}))
for _ in range(3):
    model.zero_grad()
    model.accumulate_step(TokenBatch(ids))
    model.step_clipped(1.0, 1.0)
# not of getrusage: it starts from what the parent process had
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_measured_peak_is_within_15_percent_of_the_plan(case):
    config, batch, seq = CASES[case]
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    program = PROGRAM.format(config=fields, batch=batch, seq=seq)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    measured = 1024 * int(done.stdout)
    planned = plan(config, CPU, batch, seq).memory.peak_bytes
    assert planned == pytest.approx(measured, rel=0.15), f"{planned / measured:.3f}"
