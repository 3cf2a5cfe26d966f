"""Writes docs/campaigns.md: what came of the campaigns.

    python -m bench.campaigns            write the page
    python -m bench.campaigns --check    is the page what would be written? exits 1 if not

The page is made of the JSON files in bench/results/campaigns/ and of nothing else.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.campaigns import page, results

PAGE = Path(__file__).parents[2] / "docs" / "campaigns.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.campaigns", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if outdated")
    parser.add_argument("--page", type=Path, default=PAGE, help="docs/campaigns.md")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="result files")
    options = parser.parse_args(arguments)
    text = page.whole(options.results)
    if options.check:
        same = options.page.is_file() and options.page.read_text(encoding="utf-8") == text
        print(f"{options.page.name} is {'up to date' if same else 'outdated: write it again'}")
        return 0 if same else 1
    options.page.write_text(text, encoding="utf-8")
    print(f"{options.page.name} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
