"""Reading numbers off machine code."""

import pytest

from fastbrain.kernels.facts import _is_float_atomic, _products, _stretch, busiest_path
from fastbrain.kernels.machine_code import Instruction


def instruction(name, address=0, target=None, predicate=""):
    return Instruction(address, name, predicate, 1, 7, 7, 0, target, name)


def program(*lines):
    """Instructions one after another; a line is a name, or a name, a target and a predicate."""
    lines = [(line,) if isinstance(line, str) else line for line in lines]
    return [
        instruction(name, 16 * n, *(16 * target for target in rest[:1]), *rest[1:])
        for n, (name, *rest) in enumerate(lines)
    ]


def names(path):
    return [i.name for i in path]


class TestProducts:
    def test_a_warps_instructions_count_by_their_size(self):
        body = [instruction("HMMA.16816.F32.BF16")] * 3 + [instruction("HMMA.1688.F32.BF16")]
        assert _products(body, 4) == 3.5

    def test_a_warp_groups_instructions_count_as_much(self):
        # 64 x 128 x 16 by four warps is 64 HMMA, 16 each
        assert _products([instruction("HGMMA.64x128x16.F32.BF16")], 4) == 16


class TestAtomics:
    @pytest.mark.parametrize(
        "name",
        ["RED.E.ADD.F32.FTZ.RN.STRONG.GPU", "ATOMG.E.ADD.F64.STRONG.GPU", "RED.E.ADD.BF16_V2"],
    )
    def test_those_on_floats_are_found(self, name):
        assert _is_float_atomic(name)

    @pytest.mark.parametrize(
        "name", ["ATOMG.E.ADD.STRONG.GPU", "RED.E.MAX.S32.STRONG.GPU", "REDUX"]
    )
    def test_those_on_integers_are_not(self, name):
        assert not _is_float_atomic(name)


def test_loads_are_told_by_their_width():
    body = [
        instruction(name)
        for name in (
            "LDG.E.128",
            "LDGSTS.E.BYPASS.128",
            "LDG.E.64",
            "LDG.E.U16",
            "STG.E.128",
            "LDS",
        )
    ]
    assert _stretch(body, 4, 0).loads == {16: 2, 8: 1, 4: 1}


class TestBusiestPath:
    def test_wide_accesses_win_over_short_code(self):
        code = program(
            ("BRA", 3, "@P0"),
            "LDG.E",
            ("BRA", 5),
            "LDG.E.128",
            "FADD",
            "EXIT",
        )
        assert names(busiest_path(code)) == ["BRA", "LDG.E.128", "FADD", "EXIT"]

    def test_of_equal_ones_the_shortest_is_taken(self):
        code = program(("BRA", 3, "@P0"), "FADD", "FADD", "LDG.E.128", "EXIT")
        assert names(busiest_path(code)) == ["BRA", "LDG.E.128", "EXIT"]

    def test_early_exits_are_not(self):
        code = program("ISETP", ("EXIT", 0, "@P0"), "LDG.E.128", "EXIT")
        code[1] = code[1]._replace(target=None)
        assert names(busiest_path(code)) == ["ISETP", "EXIT", "LDG.E.128", "EXIT"]

    def test_loops_are_passed_once(self):
        code = program("MOV", "LDG.E.128", "FADD", "FADD", ("BRA", 1, "@P0"), "EXIT", ("BRA", 6))
        assert names(busiest_path(code)) == ["MOV", "LDG.E.128", "FADD", "FADD", "BRA", "EXIT"]
