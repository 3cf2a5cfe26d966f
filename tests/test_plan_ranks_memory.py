"""The planned memory of a shard against the bytes that a rank of a CPU allocates, counted.

PyTorch's fake process group stands for the other ranks: it sends nothing and allocates nothing, so
that what is counted is FSDP2's, to the byte, and the same in every run.
"""

import json
import subprocess
import sys

import pytest

from fastbrain.config import TransformerConfig
from fastbrain.plan import Card, memory
from fastbrain.plan.memory import PROCESS_BYTES

CPU = Card("cpu", "a CPU", 1, 0, 1e11, 1e11, 1e10, 2**34, product_share=1.0, is_cpu=True)
COMMON = {"d_model": 128, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 64, "d_ff": 352}
# mostly blocks; mostly the root; experts
CASES = {
    "blocks": TransformerConfig(512, n_layers=8, moe_layers=(), **COMMON | {"d_ff": 1408}),
    "root": TransformerConfig(20_000, n_layers=2, moe_layers=(), **COMMON),
    "moe": TransformerConfig(1024, n_layers=4, moe_d_ff=352, moe_layers=(1, 2, 3), **COMMON),
}
PROGRAM = """
import json, sys, torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from fastbrain import TokenBatch, TransformerConfig, TransformerLm
from fastbrain.parallel.launch import Launch
from fastbrain.parallel.ranks import Ranks
from fastbrain.parallel.shards import bytes_held

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
ranks = Ranks(Launch(world_size=4), torch.device("cpu"), dist.group.WORLD)
for name, fields in json.loads(sys.argv[1]).items():
    config = TransformerConfig(**fields | {"moe_layers": tuple(fields["moe_layers"])})
    model = TransformerLm(config, seed=1, mixed_precision=False)
    model.distribute(ranks, "fsdp")

    def step(micro_batches):
        model.zero_grad()
        for _ in range(micro_batches):
            ids = torch.randint(config.vocab_size, (1, 16))
            model.accumulate_step(TokenBatch(ids), weight=1 / micro_batches)
        model.step_clipped(1.0, 1.0)

    step(1)
    for micro_batches in (1, 2):
        held = sum(bytes_held(kind.values()) for kind in model.tensors().values())
        assert all(p.grad is None for p in model.module.parameters())
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step(micro_batches)
        events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        peak = now = held
        for event in sorted(events, key=lambda event: event.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
        print("FOUND", name, micro_batches, held, peak)
"""


@pytest.mark.slow
def test_the_counted_peak_of_a_rank_is_within_10_percent_of_the_plan(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    shapes = {
        name: {field: getattr(config, field) for field in config.__dataclass_fields__}
        for name, config in CASES.items()
    }
    command = [sys.executable, str(program), json.dumps(shapes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = [row.split()[1:] for row in done.stdout.splitlines() if row.startswith("FOUND")]
    assert len(rows) == 2 * len(CASES)
    for name, micro_batches, held, peak in rows:
        made = memory(CASES[name], CPU, 1, 16, False, int(micro_batches), 4)
        assert made.parts["weights"] + made.parts["moments"] == int(held), name
        planned = made.peak_bytes - PROCESS_BYTES
        assert planned == pytest.approx(int(peak), rel=0.1), f"{name}: {planned / int(peak):.3f}"
