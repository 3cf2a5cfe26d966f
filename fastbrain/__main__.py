"""`python -m fastbrain`: the `fastbrain` command where no script is installed."""

import sys

from fastbrain.cli import main

sys.exit(main())
