"""Gates can fail: code that breaks each of them, and launches whose work is known."""

from types import SimpleNamespace

import pytest
import torch

from fastbrain.kernels import gates
from fastbrain.kernels.closed_forms import Work, alone, balanced, skewed, work_of
from fastbrain.kernels.facts import Facts, Stretch
from fastbrain.kernels.launch import Launch
from fastbrain.kernels.production import CHAPTER, DENSE, Case

LOOP = Stretch(300, 64.0, 0, {16: 8, 4: 2}, {1: 2300.0, 2: 2100.0}, 2048.0)
STRAIGHT = Stretch(500, 0.0, 0, {16: 4}, {2: 1500.0}, 0.0)
GOOD = Facts(
    "_fwd_kernel", 200, 0, 0, 24576, 4, 2, 128.0, 20, ["HMMA.16816.F32.BF16"], 0,
    [LOOP, LOOP], STRAIGHT,
)  # fmt: skip


def launch(module, kernel, grid, arguments, **options):
    """As if recorded: names and values are all that closed forms read."""

    def function():
        pass

    function.__module__ = f"fastbrain.kernels.{module}"
    function.__name__ = f"_{kernel}_kernel"
    whole = SimpleNamespace(fn=function, arg_names=list(arguments))
    return Launch(whole, grid, tuple(arguments.values()), options)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def attention(kernel="fwd", B=4, S=1024, H=12, G=4, K=64, i=64, j=64):
    heads, rows = (G, j) if kernel == "bwd_dkv" else (H, i)
    tensors = {"q_ptr": meta(B, S, H, K), "k_ptr": meta(B, S, G, K), "v_ptr": meta(B, S, G, K)}
    tile = {"K": K, "WIDTH": K, "BLOCK_I": i, "BLOCK_J": j, "num_warps": 4}
    return launch("attention", kernel, (B * heads, -(-S // rows)), tensors, **tile)


def grouped(kernel="rows", rows=16384, E=8, D=1024, C=512):
    tile = {"num_warps": 4}
    if kernel == "rows":
        tile |= {"ROWS": 128, "BLOCK_M": 128, "BLOCK_C": 128, "BLOCK_D": 32}
        arguments = {"x_ptr": meta(rows, D), "E": E, "C": C, "D": D}
    else:
        tile |= {"BLOCK_C": 64, "BLOCK_D": 128, "BLOCK_M": 32}
        arguments = {"x_ptr": meta(rows, D), "offsets_ptr": meta(E + 1), "num_rows": rows}
        arguments |= {"C": C, "D": D}
    return launch("grouped_gemm", kernel, (1,), arguments, **tile)


def case(start, dtype=torch.bfloat16, model=DENSE):
    return Case("some_operation", model.name, dtype, start, model)


def failed(facts, start, family="sm_86", **changes):
    work = work_of(start)._replace(**changes)
    return [g.name for g in gates.of_code(facts, work, case(start), family) if not g.passed]


class TestGates:
    def test_good_code_passes(self):
        assert failed(GOOD, attention()) == []

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ({"spills": 1}, "no spills"),
            ({"spill_bytes": 4}, "no spills"),
            ({"float_atomics": 1}, "no float atomics"),
            ({"shared": 101_377}, "shared memory <= 101,376"),
            ({"ctas": 1}, "CTAs per SM >= 2"),
            ({"products": 127.0}, "HMMA as the closed form"),
            ({"products": 192.0}, "HMMA as the closed form"),
            ({"loops": [LOOP, LOOP._replace(loads={16: 7, 4: 9})]}, "16-byte loads"),
        ],
        ids=lambda x: "" if isinstance(x, str) else next(iter(x)),
    )
    def test_each_flaw_fails_its_gate(self, change, name):
        assert failed(GOOD._replace(**change), attention()) == [name]

    def test_other_widths_may_fill_an_sm_alone(self):
        wide = attention(K=128, i=64, j=32)
        facts = GOOD._replace(ctas=1, loops=[LOOP._replace(loads={16: 16})])
        assert failed(facts, wide) == []
        assert failed(facts._replace(ctas=0), wide) == ["CTAs per SM >= 1"]

    def test_hopper_needs_its_own_instructions(self):
        assert failed(GOOD, attention(), "sm_90") == ["HGMMA as the closed form"]
        facts = GOOD._replace(tensor_kinds=["HGMMA.64x64x16.F32.BF16"])
        assert failed(facts, attention(), "sm_90") == []
        for family in ("sm_80", "sm_86", "sm_89"):
            assert failed(facts, attention(), family) == ["HMMA as the closed form"]
            assert failed(GOOD, attention(), family) == []

    @pytest.mark.parametrize(("family", "most"), [("sm_80", 166_912), ("sm_89", 101_376)])
    def test_each_card_has_its_own_shared_memory(self, family, most):
        assert failed(GOOD._replace(shared=most), attention(), family) == []
        found = failed(GOOD._replace(shared=most + 1), attention(), family)
        assert found == [f"shared memory <= {most:,}"]

    def test_fp32_products_are_not_tf32(self):
        start = attention()
        facts = GOOD._replace(products=0.0, multiply_adds=8192, tensor_kinds=[])

        def judged(found):
            every = gates.of_code(found, work_of(start), case(start, torch.float32), "sm_86")
            return {g.name: g.passed for g in every}["FP32 products in FP32 units"]

        assert judged(facts)
        assert not judged(facts._replace(multiply_adds=8191))
        assert not judged(facts._replace(tensor_kinds=["HMMA.1688.F32.TF32"]))

    def test_idle_tensor_cores_fail_an_expert_product(self):
        start = grouped()
        loop = LOOP._replace(tensor_cycles=0.91 * 2100)
        facts = GOOD._replace(products=64.0, loops=[loop])
        assert failed(facts, start) == []
        slow = facts._replace(loops=[loop._replace(tensor_cycles=0.89 * 2100)])
        assert failed(slow, start) == ["tensor share >= 90%"]

    def test_streaming_kernels_are_limited_by_bytes(self):
        start = launch(
            "activation", "fwd", (8192, 1), {"gate_up_ptr": meta(8192, 2048)}, BLOCK=1024
        )
        loads = STRAIGHT._replace(loads={16: 2})
        facts = GOOD._replace(products=0.0, tensor_kinds=[], loops=[], straight=loads)
        # 33.5 MB at 330 GB/s are 0.102 ms; each of 28 SMs may spend 618 cycles on a CTA
        quick = facts._replace(straight=loads._replace(cycles={2: 600.0}))
        assert failed(quick, start) == []
        slow = facts._replace(straight=loads._replace(cycles={2: 640.0}))
        assert failed(slow, start) == ["limited by bytes"]

    def test_attention_has_a_time_to_keep(self):
        def judged(cycles):
            loop = LOOP._replace(cycles={1: cycles, 2: cycles})
            (gate,) = gates.of_times([(case(attention()), GOOD._replace(loops=[loop]))])
            return gate

        # 12 * 4 * 16 * 17 / 2 tiles on 28 SMs, and the rest of each CTA is worth 0.6 tiles
        assert judged(2100.0).passed
        assert not judged(2500.0).passed

    def test_routed_rows_may_not_cost_much_more_than_one_experts(self):
        def judged(rows):
            start = grouped(rows=rows, C=1024)
            facts = GOOD._replace(loops=[LOOP])
            return [g.passed for g in gates.of_times([(case(start, model=CHAPTER), facts)])]

        # balanced, and 3:1
        assert judged(16384) == [True, True]
        # one expert's 7 x 8 blocks fill 28 SMs of two CTAs, and 8 x 8 start another wave
        assert judged(896) == [False, False]


class TestWork:
    @pytest.mark.parametrize(("i", "j"), [(64, 64), (64, 32), (128, 64), (32, 64)])
    def test_attention_computes_every_tile_that_anything_is_seen_of(self, i, j):
        if i >= j:
            tiles = sum(sum(runs) for runs in work_of(attention(i=i, j=j)).ctas)
            assert tiles == 48 * sum(-(-(first + i) // j) for first in range(0, 1024, i))
        backward = attention("bwd_dkv", i=min(i, j), j=max(i, j))
        i, j = min(i, j), max(i, j)
        tiles = sum(sum(runs) for runs in work_of(backward).ctas)
        assert tiles == 4 * 12 * sum((1024 - first) // i for first in range(0, 1024, j))

    def test_longest_blocks_start_first(self):
        for kernel in ("fwd", "bwd_dq"):
            totals = [sum(runs) for runs in work_of(attention(kernel)).ctas]
            assert totals == sorted(totals, reverse=True)

    def test_products_follow_from_the_tiles(self):
        def expected(start):
            return gates.expected_products(GOOD, work_of(start))

        # one unmasked and one diagonal copy
        assert expected(attention()) == 2 * 2 * 64 * 64 * 64 / (2048 * 4)
        assert expected(attention("bwd_dq", j=32)) == 2 * 3 * 64 * 32 * 64 / (2048 * 4)
        assert expected(attention("bwd_dkv", i=32)) == 2 * 4 * 32 * 64 * 64 / (2048 * 4)
        assert expected(grouped()) == 128 * 128 * 32 / (2048 * 4)

    def test_products_cost_their_flops(self):
        assert work_of(grouped()).flops == 2 * 16384 * 512 * 1024
        assert work_of(grouped("weights")).flops == 2 * 16384 * 512 * 1024

    def test_a_partial_block_of_an_expert_costs_a_whole_one(self):
        work = work_of(grouped(rows=8 * 129), balanced)
        assert len(work.ctas) == 8 * 2 * 4

    @pytest.mark.parametrize("rows", [0, 7, 16384])
    def test_no_row_is_lost(self, rows):
        for loads in (balanced, skewed, alone):
            assert sum(loads(rows, 8)) == rows

    def test_skew_is_three_to_one(self):
        loads = skewed(16384, 8)
        assert loads == sorted(loads, reverse=True)
        assert loads[0] / loads[-1] == pytest.approx(3, rel=0.01)

    def test_rows_of_logits_are_read_as_wide_as_they_lie(self):
        def vector(V):
            return work_of(
                launch(
                    "cross_entropy", "fwd", (8,),
                    {"logits_ptr": meta(8, V), "columns": V, "stride": V},
                    VECTOR=1, BLOCK=2048,
                )
            ).vector  # fmt: skip

        assert [vector(V) for V in (32000, 32004, 32001)] == [16, 8, 2]

    def test_other_kernels_have_the_bytes_of_their_tensors(self):
        start = launch("routing", "count", (4,), {"ids_ptr": meta(100), "counts_ptr": meta(10)})
        assert work_of(start) == Work([()] * 4, 220)
