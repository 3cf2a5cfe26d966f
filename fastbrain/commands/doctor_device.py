"""What `fastbrain doctor` says of the card: what it is, who else uses it, whether kernels run."""

import os
import re
import shutil
from importlib import metadata

from fastbrain.commands.doctor_check import Check, State, gigabytes, output_of, safely

# the first and the last series that the kernels were tested with
_FIRST, _LAST = (3, 7), (3, 9)
# what a small model takes, in bytes
_LEAST_FREE = 2_000_000_000
_SHARED = (
    "A card that is shared is about half as fast, and its memory may run out at any time: end the "
    "others before a long run."
)


def checks() -> list[Check]:
    """The findings; on a machine without a card, that there is none, and Triton."""
    import torch

    if not torch.cuda.is_available():
        return [safely("gpu", _no_card), _triton(has_card=False)]
    looks = [("gpu", _card), ("gpu memory", _memory), ("gpu bf16", _bf16)]
    if torch.cuda.get_device_capability(0) >= (8, 0):
        looks.append(("a kernel", _kernel))
    looks += [("gpu users", _others), ("display", _display)]
    return [_triton(has_card=True), *(safely(name, look) for name, look in looks)]


def _no_card() -> Check:
    import torch

    if "GPU " not in (output_of("nvidia-smi", "-L") or ""):
        advice = "Training takes place on the CPU, which is for small models: try `fastbrain plan`."
        return Check("gpu", "none", "ok", advice)
    if torch.version.cuda is None:
        advice = (
            "There is a card, but this PyTorch was built without CUDA: install its CUDA build (see "
            "pytorch.org)."
        )
    else:
        advice = (
            "There is a card, but PyTorch cannot use it: look at the driver (this PyTorch wants "
            f"CUDA {torch.version.cuda}) and at CUDA_VISIBLE_DEVICES."
        )
    return Check("gpu", "not usable", "warning", advice)


def _card() -> Check:
    import torch

    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    driver = _asked("driver_version")
    value = f"{properties.name}, capability {capability[0]}.{capability[1]}, driver {driver}"
    if capability < (8, 0):
        advice = (
            "The kernels need capability 8.0 (Ampere) or newer, and training on this card is "
            "refused: hide it with CUDA_VISIBLE_DEVICES= to train on the CPU."
        )
        return Check("gpu", value, "problem", advice)
    return Check("gpu", value)


def _memory() -> Check:
    import torch

    free, total = torch.cuda.mem_get_info(0)
    value = f"{gigabytes(total)}, {gigabytes(free)} free"
    if free < _LEAST_FREE:
        return Check("gpu memory", value, "warning", "Little is free: end what else uses the card.")
    return Check("gpu memory", value)


def _bf16() -> Check:
    import torch

    if torch.cuda.is_bf16_supported(including_emulation=False):
        return Check("gpu bf16", "yes")
    return Check("gpu bf16", "no", "problem", "Mixed precision, the default on a card, needs it.")


def _triton(has_card: bool) -> Check:
    # where there is no card it serves only to develop kernels
    bad: State = "problem" if has_card else "ok"
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        advice = "The kernels need it: `pip install triton`." if has_card else "A card needs it."
        return Check("kernels", "triton is not installed", bad, advice)
    series = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if not _FIRST <= series <= _LAST:
        advice = (
            f"The kernels were tested with {_FIRST[0]}.{_FIRST[1]} to {_LAST[0]}.{_LAST[1]}: "
            "install one of those if anything goes wrong."
        )
        return Check("kernels", f"triton {version}", "warning" if has_card else "ok", advice)
    compiler = _compiler()
    if compiler is None:
        advice = "Triton compiles its launcher with a C compiler: install gcc, or set CC."
        return Check("kernels", f"triton {version}, no C compiler", bad, advice)
    return Check("kernels", f"triton {version}, compiler {compiler}")


def _compiler() -> str | None:
    named = os.environ.get("CC")
    return shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")


def _kernel(device: str = "cuda") -> Check:
    """Runs one kernel and compares it with the plain operation."""
    import torch

    from fastbrain.kernels import fused, reference, rms_norm, use

    x = torch.linspace(-3, 3, 4 * 256, device=device).reshape(4, 256)
    weight = torch.linspace(0.5, 1.5, 256, device=device)
    try:
        with use(fused):
            ours, _ = rms_norm(x, weight, 1e-6)
        with use(reference):
            truth, _ = rms_norm(x, weight, 1e-6)
        error = float((ours - truth).abs().max() / truth.abs().max())
    except Exception as failure:  # a driver, a compiler or a launcher may each raise its own
        reason = " ".join(str(failure).split())[:300]
        advice = f"Training on the card would fail likewise: {type(failure).__name__}: {reason}"
        return Check("a kernel", "fails", "problem", advice)
    if not error < 1e-5:
        advice = "Nothing that is trained on this card can be trusted: reinstall torch and triton."
        return Check("a kernel", f"wrong by {error:.1e}", "problem", advice)
    return Check("a kernel", f"compiled, run, and right to {error:.0e}")


def _others() -> Check:
    listed = output_of(
        "nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"
    )
    if listed is None:
        return Check("gpu users", "not known", "ok", "nvidia-smi would tell; it is not there.")
    others = [
        " ".join(line.split())
        for line in listed.splitlines()
        if line.strip() and line.split(",")[0].strip() != str(os.getpid())
    ]
    if others:
        return Check("gpu users", "; ".join(others), "warning", _SHARED)
    return Check("gpu users", "no other")


def _display() -> Check:
    active = _asked("display_active")
    if active.lower() == "enabled":
        advice = "A desktop takes some of the memory; `fastbrain plan --budget-mib` allows for it."
        return Check("display", "attached to the card", "ok", advice)
    return Check("display", "none on the card" if active.lower() == "disabled" else "not known")


def _asked(field: str) -> str:
    """What nvidia-smi says of the first card."""
    found = output_of("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader") or ""
    return found.split("\n")[0].strip() or "not known"
