"""`python -m fastbrain.sweep_arch vocab d_model layers batch seq [moe] [experts] [top_k]`."""

import sys

from fastbrain.sweep_arch.command import main

if __name__ == "__main__":
    sys.exit(main())
