"""How the empty cells are filled: the command, what it writes, and where that goes."""

from bench.report.markdown import block, bullets, page, prose

_COMMAND = "bench/device_check.sh"
_MORE = {
    "operations": "fastbrain bench --json bench/results/CARD-operations.json",
    "steps": "python -m bench.training_step --json bench/results/CARD-training-step.json",
    "shapes": "python -m fastbrain.sweep_arch --table shapes.txt",
}

_NEEDS = (
    "On a machine with an NVIDIA GPU of compute capability 8.0 or newer, python3 with torch, "
    "triton, numpy, safetensors and tokenizers, and nothing else on the GPU, from the root of a "
    "clean checkout:"
)
_DOES = (
    "It checks the kernels first and then times every operation and whole training steps: the "
    "chapter's model, the default MoE and the dense 101.7M. On a card much slower than an H200, "
    "`--budget 3` gives every part more time. It writes `bench/results/CARD.json` and sends "
    "nothing anywhere. The file holds:"
)
_HOLDS = (
    "the card, its driver, clocks and memory, the versions of Python and packages, the commit, the "
    "date and the command;",
    "of every part whether it passed, and of a case that failed its traceback, which has the paths "
    "of files in it: read it before you send it;",
    "milliseconds of every operation, fastbrain's and the installed peers';",
    "tokens per second and peak memory of whole steps, beside the plan's.",
)
_ADDS = (
    "These add what it leaves out. `shapes.txt` has a shape a line, such as "
    "`32000 1024 20 8 512 1 8 2`; move the JSON file beside it to `bench/results/`."
)
_THEN = (
    "Then `python -m bench.report` writes this page again with the figures in it; open a pull "
    "request that adds the JSON files to `bench/results/`, and the page. A file is refused when it "
    "does not say what it was measured on, or is of a toy size. Send a slow result as well: it is "
    "as much worth knowing."
)


def section() -> str:
    """What a reader with a card can do."""
    return page(
        [
            "## Filling the table of a card",
            prose(_NEEDS),
            block([("command", _COMMAND)]),
            prose(_DOES),
            bullets(_HOLDS),
            prose(_ADDS),
            block(_MORE.items()),
            prose(_THEN),
        ]
    ).rstrip("\n")
