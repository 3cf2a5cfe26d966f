"""The launches that the report compiles."""

import math
import re
from pathlib import Path

import pytest

from fastbrain import kernels
from fastbrain.kernels import fused
from fastbrain.kernels.closed_forms import name_of, work_of
from fastbrain.kernels.cycles import LIMITS
from fastbrain.kernels.launch import HOME
from fastbrain.kernels.production import (
    CHAPTER,
    DEFAULT,
    DENSE,
    OPERATIONS,
    Choice,
    _parameters,
    cases,
    shapes,
)


@pytest.fixture(scope="module")
def every():
    return cases(HOME)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [(CHAPTER, 340_952_064), (DEFAULT, 55_181_824), (DENSE, 101_674_752)],
    ids=lambda x: getattr(x, "name", ""),
)
def test_the_models_have_their_published_sizes(model, parameters):
    assert sum(math.prod(shape) for shape in _parameters(model)) == parameters


def test_every_operation_is_among_them(every):
    # a plain product has no kernel of our own, and the last is a type
    expected = set(fused.__all__) - {"linear", "AdamScalars"}
    assert {case.operation for case in every} == expected == set(OPERATIONS)


def test_every_shape_is_among_them(every):
    assert list(dict.fromkeys(case.shape for case in every)) == shapes()


@pytest.mark.parametrize("family", LIMITS)
def test_families_have_the_same_operations_at_the_same_shapes(every, family):
    def asked(found):
        return {(case.operation, case.shape, case.dtype) for case in found}

    assert asked(cases(family)) == asked(every)


def test_every_kernel_is_among_them(every):
    written = set()
    for path in Path(kernels.__file__).parent.glob("*.py"):
        names = re.findall(r"^def _(\w+)_kernel\(", path.read_text(), re.MULTILINE)
        written |= {f"{path.stem}.{name}" for name in names}
    assert {name_of(case.launch) for case in every} == written


def test_all_of_them_have_work_to_do(every):
    for case in every:
        work = work_of(case.launch)
        assert len(work.ctas) > 0
        assert work.bytes > 0


def test_products_are_those_of_the_operations(every):
    """An expert FFN has 6 P D F of them forward and 12 backward, P its routed rows."""
    chosen = [c for c in every if c.model is CHAPTER and c.operation == "expert_ffn"]
    flops = sum(work_of(c.launch).flops for c in chosen if c.dtype == chosen[0].dtype)
    rows = CHAPTER.B * CHAPTER.S * CHAPTER.top_k
    assert flops == 18 * rows * CHAPTER.D * CHAPTER.moe_d_ff


def test_a_choice_takes_its_part(every):
    few = cases(HOME, Choice(["swiglu"], ["dense"], [every[0].dtype]))
    assert [name_of(c.launch) for c in few] == ["activation.fwd", "activation.bwd"]
