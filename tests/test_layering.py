"""The package reads top to bottom: a module imports only modules listed before it."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import fastbrain
from fastbrain import kernels

# fmt: off
ORDER = [
    "errors", "atomic", "kernels", "precision", "schedule", "stdrng", "tokens", "config", "plan",
    "layers", "moe", "transformer", "parallel", "fused_adam", "optim", "optimizer_state", "builder",
    "formats", "sampler", "generate", "devices", "losses", "stored_model", "distributed_model",
    "lm", "training", "sweep_arch", "train", "commands", "cli",
]
# fmt: on
# these import what takes seconds when they come to need it, so that --help is quick
COMMANDS = ("sweep_arch", "train", "commands", "cli")
ROOT = Path(fastbrain.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

every_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))


class Import(NamedTuple):
    """One dotted name that a file imports, such as fastbrain.kernels.reference."""

    module: str
    local: bool

    @property
    def parts(self) -> list[str]:
        return self.module.split(".")


def imports(source: str) -> Iterator[Import]:
    """What a file imports, anywhere in it; `local` inside a function."""
    tree = ast.parse(source)
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name their module from fastbrain on"
            for alias in node.names:
                yield Import(f"{node.module}.{alias.name}", id(node) in inside)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, id(node) in inside)


def own(path: Path) -> list[Import]:
    """The imports of a file from fastbrain itself."""
    found = imports(path.read_text())
    return [i for i in found if i.parts[0] == "fastbrain" and len(i.parts) > 1]


def home(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@every_file
def test_imports_point_down(path):
    here = home(path)
    if here in ("__init__", "__main__"):
        return
    above = ["errors"] if here == "kernels" else ORDER[: ORDER.index(here)]
    for there in own(path):
        assert there.parts[1] in [here, *above], f"{here} must not import {there.module}"


@every_file
def test_only_the_kernels_look_beneath_their_facade(path):
    if home(path) == "kernels":
        return
    for there in own(path):
        if there.parts[1] == "kernels":
            name = there.module.removeprefix("fastbrain.kernels").removeprefix(".")
            assert not name or name in kernels.__all__, there.module


@every_file
def test_nothing_but_the_kernels_imports_triton(path):
    uses = any(i.parts[0] == "triton" for i in imports(path.read_text()))
    plain = path.name.startswith(("__init__", "contracts", "devices", "matmul", "reference"))
    assert not uses or (home(path) == "kernels" and not plain)


@every_file
def test_imports_stand_at_the_top(path):
    if home(path) not in COMMANDS:
        assert not [i.module for i in own(path) if i.local]


def test_no_operation_has_the_name_of_its_module():
    modules = {path.stem for path in (ROOT / "kernels").glob("*.py")} - {"fused", "reference"}
    assert not modules & set(kernels.__all__)
