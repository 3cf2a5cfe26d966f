"""The model of the home card, on sequences whose time is known."""

import pytest

from fastbrain.kernels.cycles import (
    COSTS,
    kind_of,
    loop_cycles,
    makespan,
    residency,
    simulate,
    tensor_cycles,
    trace,
)
from fastbrain.kernels.machine_code import Instruction, innermost_loops, instructions

# in the way of nvdisasm -hex -c: a loop of four instructions and its branch inside another loop
LISTING = """
//--------------------- .text._other_kernel --------------------------
.text._other_kernel:
        /*0000*/                   EXIT ;                            /* 0x000000000000794d */
                                                                     /* 0x000fea0003800000 */
//--------------------- .text._some_kernel --------------------------
.text._some_kernel:
.L_x_1:
        /*0000*/                   LDG.E.128 R4, [R2.64] ;           /* 0x0000000402047981 */
                                                                     /* 0x000e84000c1e1900 */
.L_x_0:
        /*0010*/              @!P0 FFMA R0, R1, R1, R0 ;             /* 0x0000000101007223 */
                                                                     /* 0x004fc80000000000 */
        /*0020*/                   FADD R0, R1, R0 ;                 /* 0x0000000001007221 */
                                                                     /* 0x000fc80000000000 */
        /*0030*/                   IADD3 R2, R2, 0x1, RZ ;           /* 0x0000000102027810 */
                                                                     /* 0x000fc80007ffe0ff */
        /*0040*/                   IADD3 R3, R3, 0x1, RZ ;           /* 0x0000000103037810 */
                                                                     /* 0x000fc80007ffe0ff */
        /*0050*/               @P1 BRA `(.L_x_0) ;                   /* 0xffffffb000001947 */
                                                                     /* 0x000fea000383ffff */
        /*0060*/               @P2 BRA `(.L_x_1) ;                   /* 0xffffff9000002947 */
                                                                     /* 0x000fea000383ffff */
        /*0070*/                   EXIT ;                            /* 0x000000000000794d */
                                                                     /* 0x000fea0003800000 */
.L_x_2:
        /*0080*/                   BRA `(.L_x_2) ;                   /* 0xfffffff000007947 */
                                                                     /* 0x000fc0000383ffff */
//--------------------- .nv.shared._some_kernel --------------------------
"""


def instruction(name, stall=1, write=7, wait=0, text=None, address=0, target=None, predicate=""):
    return Instruction(address, name, predicate, stall, write, 7, wait, target, text or name)


def cycles_of(body, warps=1):
    return simulate(body, warps).cycles


class TestInstructions:
    def test_each_issues_in_its_own_cycle(self):
        independent = [instruction("FFMA"), instruction("LEA"), instruction("MUFU.EX2")]
        # the slowest pipe takes one every 8 cycles, and its neighbours issue meanwhile
        assert cycles_of(independent, warps=4) == pytest.approx(8, rel=0.01)
        assert cycles_of([instruction("FFMA")] * 8, warps=4) == pytest.approx(8, rel=0.01)

    def test_a_chain_of_dependent_additions_waits_four_cycles_each(self):
        chain = [instruction("FFMA", stall=4)] * 10
        assert cycles_of(chain) == pytest.approx(40, rel=0.01)

    def test_four_warps_hide_the_chain(self):
        chain = [instruction("FFMA", stall=4)] * 10
        assert cycles_of(chain, warps=2) == pytest.approx(20, rel=0.02)
        assert cycles_of(chain, warps=4) == pytest.approx(10, rel=0.02)
        assert cycles_of(chain, warps=8) == pytest.approx(10, rel=0.02)

    @pytest.mark.parametrize("warps", [1, 2, 3])
    def test_tensor_products_take_32_cycles_of_a_sub_core(self, warps):
        products = [instruction("HMMA.16816.F32.BF16")] * 6
        assert cycles_of(products, warps) == pytest.approx(6 * 32, rel=0.01)
        assert tensor_cycles(products) == 6 * 32

    def test_work_beside_a_tensor_product_is_free(self):
        product = instruction("HMMA.16816.F32.BF16")
        body = [product, *[instruction("FFMA")] * 20]
        assert cycles_of(body, warps=2) == pytest.approx(32, rel=0.02)

    def test_what_needs_a_load_waits_for_it(self):
        load = instruction("LDG.E", write=0)
        use = instruction("FFMA", wait=0b1)
        assert cycles_of([load, use]) == pytest.approx(240 + 1, rel=0.001)
        other = instruction("FFMA", wait=0b10)
        assert cycles_of([load, other]) < 20

    def test_warps_hide_each_others_loads(self):
        body = [instruction("LDG.E", write=0), instruction("FFMA", wait=0b1)]
        assert cycles_of(body, warps=4) == pytest.approx(241 / 4, rel=0.02)

    def test_copies_are_waited_for_by_group(self):
        copy = instruction("LDGSTS.E.BYPASS.128")
        commit = instruction("LDGDEPBAR")

        def body(pending):
            wait = instruction("DEPBAR.LE", text=f"DEPBAR.LE SB0, 0x{pending}")
            return [copy, commit, wait]

        latency = COSTS["load128"].latency
        assert cycles_of(body(0)) == pytest.approx(latency + 1, rel=0.02)
        # one group ahead, so every copy has a whole round more
        assert cycles_of(body(1)) == pytest.approx(latency / 2, rel=0.02)

    def test_wide_shared_memory_takes_its_128_bytes_a_cycle_and_sm(self):
        # 32 threads of 16 bytes, and a quarter of the SM's 128 bytes a cycle for each sub-core
        assert cycles_of([instruction("LDS.128")] * 4, warps=4) == pytest.approx(4 * 16, rel=0.02)

    def test_integer_products_take_half_of_the_lanes(self):
        assert cycles_of([instruction("IMAD")] * 8, warps=4) == pytest.approx(16, rel=0.02)
        # the other half goes on adding
        mixed = [instruction("IMAD"), instruction("FFMA")] * 8
        assert cycles_of(mixed, warps=4) == pytest.approx(16, rel=0.02)

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("HMMA.16816.F32.BF16", "hmma16816"),
            ("HMMA.16816.F16", "hmma16816half"),
            ("HMMA.1688.F32.TF32", "hmma1688tf32"),
            ("LDSM.16.MT88.4", "matrix_load4"),
            ("LDGSTS.E.BYPASS.128", "load128"),
            ("LDG.E.64", "load64"),
            ("STG.E.128", "store128"),
            ("IMAD.MOV.U32", "imad"),
            ("ULDC.64", "uniform"),
            ("S2UR", "uniform"),
            ("IADD3.X", "alu"),
        ],
    )
    def test_mnemonics_are_known(self, name, kind):
        assert kind_of(name) == kind
        assert kind in COSTS


class TestResidency:
    @pytest.mark.parametrize(
        ("registers", "shared", "warps", "ctas"),
        [
            (144, 49 * 1024, 4, 2),  # shared memory: two times 50 of 100 KB
            (144, 50 * 1024, 4, 1),
            (168, 24 * 1024, 4, 3),  # registers: three times 128 * 168 of 65,536
            (161, 24 * 1024, 4, 3),  # which are given out by eight
            (169, 24 * 1024, 4, 2),
            (16, 0, 4, 12),  # warps: 48
            (16, 0, 1, 16),  # CTAs
            (255, 101_376, 8, 1),
        ],
    )
    def test_the_scarcest_resource_decides(self, registers, shared, warps, ctas):
        assert residency(registers, shared, warps) == ctas

    def test_what_is_too_large_for_an_sm_does_not_run(self):
        assert residency(32, 101_376 + 1, 4) == 0
        assert residency(255, 0, 9) == 0
        assert residency(32, 101_376 + 1, 4, "sm_90") == 2

    @pytest.mark.parametrize(
        ("family", "shared", "warps", "ctas"),
        [
            ("sm_80", 166_912, 4, 1),
            ("sm_80", 166_912 + 1, 4, 0),
            ("sm_80", 0, 4, 16),  # warps: 64
            ("sm_80", 0, 1, 32),  # CTAs
            ("sm_89", 101_376, 4, 1),
            ("sm_89", 101_376 + 1, 4, 0),
            ("sm_89", 0, 4, 12),  # warps: 48
            ("sm_89", 0, 1, 24),  # CTAs
        ],
    )
    def test_cards_have_limits_of_their_own(self, family, shared, warps, ctas):
        assert residency(16, shared, warps, family) == ctas


class TestKernels:
    def test_one_iteration_costs_a_cta_its_share_of_the_sm(self):
        body = [instruction("HMMA.16816.F32.BF16")] * 4
        # four warps: one for each sub-core, and eight: two
        assert loop_cycles(body, 2, 4) == pytest.approx({1: 128, 2: 128}, rel=0.01)
        assert loop_cycles(body, 1, 8) == pytest.approx({1: 256}, rel=0.01)
        # two CTAs of two warps fill the sub-cores that one of them leaves idle
        assert loop_cycles(body, 2, 2) == pytest.approx({1: 128, 2: 64}, rel=0.01)

    def test_one_cta_too_many_starts_another_wave(self):
        cycles = {1: 100.0, 2: 100.0}
        full = makespan([10] * 56, cycles, fixed=0)
        assert full == pytest.approx(10 * 2 * 100)
        # the last one has an SM for itself
        assert makespan([10] * 57, cycles, fixed=0) == pytest.approx(full + 10 * 100)

    def test_residents_share_an_sm_until_one_ends(self):
        # 30 and 10 iterations: both slow until the short one is done
        cycles = {1: 100.0, 2: 60.0}
        expected = 10 * 2 * 60 + 20 * 100
        assert makespan([30, 10], cycles, sms=1, fixed=0) == pytest.approx(expected)

    def test_longest_first_shortens_the_tail(self):
        iterations = [1] * 42 + [8] * 14
        cycles = {1: 100.0}
        late = makespan(iterations, cycles, fixed=0)
        early = makespan(sorted(iterations, reverse=True), cycles, fixed=0)
        assert (early, late) == pytest.approx((800, 900))

    def test_prologue_and_epilogue_count_for_every_cta(self):
        assert makespan([4] * 56, {1: 100.0}, fixed=0.5) == pytest.approx(2 * 450)

    def test_no_cta_takes_no_time(self):
        assert makespan([], {1: 100.0}) == 0


class TestListing:
    def test_only_the_named_kernel_is_read(self):
        code = instructions(LISTING, "_some_kernel")
        assert [i.address for i in code] == list(range(0, 0x90, 0x10))
        assert len(instructions(LISTING, "_other_kernel")) == 1
        with pytest.raises(ValueError, match=r"_other_kernel.*got '_third_kernel'"):
            instructions(LISTING, "_third_kernel")

    def test_control_codes_come_from_the_upper_half(self):
        load, product, *_ = instructions(LISTING, "_some_kernel")
        assert (load.name, load.predicate, load.write, load.wait) == ("LDG.E.128", "", 2, 0)
        assert (product.name, product.predicate) == ("FFMA", "@!P0")
        assert (product.stall, product.write, product.wait) == (4, 7, 0b100)

    def test_branches_know_where_they_go(self):
        code = instructions(LISTING, "_some_kernel")
        assert {i.address: i.target for i in code if i.target is not None} == {
            0x50: 0x10,
            0x60: 0x0,
            0x80: 0x80,
        }

    def test_only_the_innermost_loops_are_found(self):
        (loop,) = innermost_loops(instructions(LISTING, "_some_kernel"))
        assert [i.name for i in loop] == ["FFMA", "FADD", "IADD3", "IADD3", "BRA"]

    def test_a_trace_repeats_loops(self):
        code = instructions(LISTING, "_some_kernel")
        names = [i.name for i in trace(code, 0, 0x70, trips={0x50: 3})]
        body = ["FFMA", "FADD", "IADD3", "IADD3", "BRA"]
        assert names == ["LDG.E.128", *body * 3, "BRA", "EXIT"]

    def test_a_trace_follows_the_branches_it_is_told(self):
        code = [
            instruction("BRA", address=0, target=0x20, predicate="@P0"),
            instruction("FFMA", address=0x10),
            instruction("FADD", address=0x20),
            instruction("BRA", address=0x30, target=0x50),
            instruction("FMUL", address=0x40),
            instruction("EXIT", address=0x50),
        ]
        through = trace(code, 0, 0x50)
        assert [i.name for i in through] == ["BRA", "FFMA", "FADD", "BRA", "EXIT"]
        assert [i.name for i in trace(code, 0, 0x50, taken={0})] == ["BRA", "FADD", "BRA", "EXIT"]
