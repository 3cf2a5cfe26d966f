"""docs/faults.md names every fault once, and every test that it names is there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "faults.md").read_text(encoding="utf-8")
FAULTS = list(range(1, 44))

# a fault is a paragraph that begins with its name in bold
PARAGRAPHS = dict(re.findall(r"^\*\*F(\d+), .+?\*\*(.+?)(?=\n\n|\Z)", PAGE, re.M | re.S))
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)


@cache
def functions(file: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def is_slow(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(each).endswith("mark.slow") for each in function.decorator_list)


def test_every_fault_has_one_paragraph():
    assert sorted(map(int, PARAGRAPHS)) == FAULTS
    assert len(re.findall(r"^\*\*F\d+", PAGE, re.M)) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_shown_by_a_test_that_always_runs(fault):
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PARAGRAPHS[str(fault)])
    assert named, "no test is named"
    assert any(not is_slow(functions(file)[name]) for file, name in named)


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_named_test_is_there(file, name):
    assert name in functions(file)


def test_what_only_the_full_suite_runs_is_marked_so():
    slow_files = {"test_every_resume.py"}  # marked as a whole
    for paragraph in PARAGRAPHS.values():
        always, _, seldom = paragraph.partition("in the full suite")
        for part, expected in ((always, False), (seldom, True)):
            for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", part):
                slow = file in slow_files or is_slow(functions(file)[name])
                assert slow == expected, f"{file}::{name}"


def test_no_name_of_a_test_is_broken():
    assert len(re.findall(r"::", PAGE)) == len(NAMED) + 1  # the one that explains
