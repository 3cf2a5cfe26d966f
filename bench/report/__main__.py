"""Writes docs/baseline.md: published, predicted and measured speed.

    python -m bench.report              write the page
    python -m bench.report --check      is the page what would be written? exits 1 if not
    python -m bench.report predicted    print one section

The page is made of bench/published.toml, fastbrain.plan and the JSON files in bench/results/, and
of nothing else: two runs on the same files write the same bytes.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.report import cited, contribute, measured, predicted, validated
from bench.report.markdown import page
from bench.report.results import BadResult, Result

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "baseline.md"
RESULTS = ROOT / "bench" / "results"

_HEAD = """\
# Speed

`python -m bench.report` writes this page out of `bench/published.toml`, `fastbrain.plan` and the
files in `bench/results/`; with `--check` it says whether the page is up to date. Do not edit it.

Three kinds of figures stand here, and every title says which: **PUBLISHED** ones are the reference
crate's, on its author's RTX 3060; **PREDICTED** ones are computed, and no card has confirmed them;
**MEASURED** ones are fastbrain's, on the machine above the table, by the command above the table.
Days for 50B tokens are 50e9 divided by the rate. Read that column before you commit to a shape."""

SECTIONS = ("published", "predicted", "validated", "measured", "contribute")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("section", nargs="?", choices=SECTIONS, help="print this one alone")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if outdated")
    parser.add_argument("--page", type=Path, default=PAGE, help="docs/baseline.md")
    parser.add_argument("--results", type=Path, default=RESULTS, help="bench/results")
    options = parser.parse_args(arguments)
    if options.check and options.section is not None:
        parser.error("--check is of the whole page: leave out the section")
    try:
        results = measured.load(options.results)
        if options.section is not None:
            print(one(options.section, results))
            return 0
        text = whole(results)
        if options.check:
            return _check(options.page, text)
        options.page.write_text(text, encoding="utf-8")
    except (BadResult, OSError, UnicodeDecodeError) as error:
        print(f"bench.report: {error}", file=sys.stderr)
        return 2
    print(f"{options.page.name} is written, with {len(results)} result files")
    return 0


def whole(results: Sequence[Result]) -> str:
    """The page."""
    return page([_HEAD, *(one(name, results) for name in SECTIONS)])


def one(section: str, results: Sequence[Result]) -> str:
    """One section of the page, by its name in `SECTIONS`."""
    match section:
        case "published":
            return cited.section()
        case "predicted":
            return predicted.section(measured.steps(results))
        case "validated":
            return validated.section()
        case "measured":
            return measured.section(results)
        case "contribute":
            return contribute.section()
    raise ValueError(f"no section {section!r}; there are {', '.join(SECTIONS)}")


def _check(path: Path, text: str) -> int:
    found = path.read_text(encoding="utf-8") if path.is_file() else ""
    if found == text:
        print(f"{path.name} is up to date")
        return 0
    changes = difflib.unified_diff(
        found.splitlines(), text.splitlines(), path.name, "as it would be written", n=0, lineterm=""
    )
    print("\n".join(list(changes)[:40]))
    print(f"{path.name} is not what this command writes: run `python -m bench.report`")
    return 1


if __name__ == "__main__":
    sys.exit(main())
