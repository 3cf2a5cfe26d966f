"""Campaigns: thousands of kills and damaged files that a run must survive to the last bit."""

import os

# threads that wait for each other take longer than so small a model; torch reads it when imported
os.environ.setdefault("OMP_NUM_THREADS", "1")
