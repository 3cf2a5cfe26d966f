"""The parts of the check, in their order, as data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One part, which runs in processes of its own.

    Attributes:
        name: what --only calls it.
        module: whose `cases(dry)` gives a name and a function each, which returns what it found;
            a third value makes it an extra, skipped unless so many seconds are left.
        budget_s: seconds that are kept for it; what earlier parts leave comes on top.
        about: what it does.
        asked: whether it only runs when it is named.
    """

    name: str
    module: str
    budget_s: float
    about: str
    asked: bool = False


_HERE = "bench.device_check"
# the first one also waits for a cold disk, and mostly leaves what it has to the others
PARTS = (
    Part("environment", f"{_HERE}.environment", 60, "card, driver, versions, clocks"),
    Part("compiling", f"{_HERE}.compiling", 50, "every kernel, several at a time"),
    Part("twins", f"{_HERE}.twins", 95, "every kernel against FP64, offsets past 2^31 too"),
    Part("determinism", f"{_HERE}.determinism", 25, "every kernel 20 times, bit for bit"),
    Part("training", f"{_HERE}.training", 40, "50 steps, fused against reference, and again"),
    Part("graphs", f"{_HERE}.graphs", 30, "a replayed CUDA graph against eager steps"),
    Part("operations", f"{_HERE}.operations", 100, "every operation against its peers, in ms"),
    Part("steps", f"{_HERE}.steps", 80, "training steps: tokens/s, and peak against the plan"),
    Part("tests", f"{_HERE}.kernel_tests", 300, "tests/kernels, where pytest is", asked=True),
)
