"""Every kernel broken on purpose, one deliberate mistake at a time: some test has to notice.

The mistakes are data, in mutants/<kernel file>.toml: what each breaks, in words, the text to find
and the text to put in its stead. A mutant goes into a copy of the package, and the tests of its
kernel file run against that copy until the first of them fails.

    python -m pytest tests/kernels/test_mutants.py -m slow -rP    shows which test caught which
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

import fastbrain

TESTS = Path(__file__).parent
PACKAGE = Path(fastbrain.__file__).parent
KERNEL_FILES = sorted(path.stem for path in (TESTS / "mutants").glob("*.toml"))


class Mutant(NamedTuple):
    """One deliberate mistake in fastbrain/kernels/<file>.py, which tests/kernels/<tests> catch."""

    breaks: str
    old: str
    new: str
    file: str
    tests: str


def mutants_of(stem: str) -> list[Mutant]:
    table = tomllib.loads((TESTS / "mutants" / f"{stem}.toml").read_text())
    defaults = {"file": stem, "tests": f"test_{stem}.py"}
    return [Mutant(**(defaults | entry)) for entry in table["mutant"]]


def name_of(mutant: Mutant) -> str:
    return f"{mutant.file}-" + re.sub(r"[^a-z0-9]+", "-", mutant.breaks.lower())


every_mutant = pytest.mark.parametrize(
    "mutant", [m for stem in KERNEL_FILES for m in mutants_of(stem)], ids=name_of
)


def kernel_files() -> list[str]:
    """The files that define Triton kernels."""
    paths = sorted((PACKAGE / "kernels").glob("*.py"))
    return [path.stem for path in paths if re.search(r"^def _\w+_kernel\(", path.read_text(), re.M)]


@pytest.mark.parametrize("stem", kernel_files())
def test_every_kernel_file_has_mutants(stem):
    aimed_here = [m for name in KERNEL_FILES for m in mutants_of(name) if m.file == stem]
    assert len(aimed_here) >= 4


@every_mutant
def test_a_mutant_changes_one_place(mutant):
    source = (PACKAGE / "kernels" / f"{mutant.file}.py").read_text()
    assert source.count(mutant.old) == 1
    assert mutant.new != mutant.old
    assert (TESTS / mutant.tests).exists()


@pytest.mark.slow
@every_mutant
def test_a_mutant_is_caught(mutant, tmp_path):
    copy = tmp_path / "fastbrain"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    broken = copy / "kernels" / f"{mutant.file}.py"
    broken.write_text(broken.read_text().replace(mutant.old, mutant.new))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:benchmark", "-p", "no:xdist"),
            *("-p", "no:cacheprovider", "-k", "not reference", "-m", "not slow", "--tb=line"),
            str(TESTS / mutant.tests),
        ],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        # away from the repository, whose own package would come before the copy
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    caught = re.search(r"^FAILED \S+?::(.*?)( - .*)?$", done.stdout, re.M)
    # a kernel that breaks the interpreter's own memory ends the process, which is noticed too
    if done.returncode < 0:
        print(f"{mutant.file}: {mutant.breaks}\n    ends the process")
        return
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert caught, done.stdout[-2000:]
    print(f"{mutant.file}: {mutant.breaks}\n    caught by {caught[1]}")
