"""What the verbs that run a model share: which model, where, and how tokens are chosen."""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fastbrain.errors import FastBrainError, InvalidConfig
from fastbrain.training.command import INTERRUPTED, REFUSED

if TYPE_CHECKING:
    from fastbrain.sampler import Sampler
    from fastbrain.training.pretrained import Pretrained

TEMPERATURE = 0.8


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the model, and the options that say how to open it."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run, a checkpoint, a Hugging Face directory, a .rbw or a .gguf file",
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json, if not the model's")
    parser.add_argument("--step", type=int, metavar="N", help="of a run: the checkpoint of step N")
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto (the default) is the first card if it can run the kernels, else the CPU",
    )


def add_sampler_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options that say how each token is chosen."""
    choice = parser.add_argument_group("how each token is chosen")
    choice.add_argument(
        "--temperature", type=float, metavar="T", help=f"0 is greedy ({TEMPERATURE})"
    )
    choice.add_argument("--top-k", type=int, metavar="K", help="of the K likeliest alone")
    choice.add_argument(
        "--top-p", type=float, metavar="P", help="of the likeliest that reach probability P"
    )
    choice.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="above 1 discourages repeating"
    )
    choice.add_argument("--greedy", action="store_true", help="always the likeliest token")
    choice.add_argument("--seed", type=int, help="of the draws (a new one each time)")


def sampler(options: argparse.Namespace) -> "Sampler":
    """The sampler that the options describe; InvalidConfig for values that make none."""
    from fastbrain.sampler import Sampler

    drawn = {
        "--temperature": options.temperature,
        "--top-k": options.top_k,
        "--top-p": options.top_p,
    }
    asked = [name for name, value in drawn.items() if value is not None]
    if options.greedy and asked:
        raise InvalidConfig(
            f"--greedy always takes the likeliest token, so {asked[0]} would do nothing: leave one "
            "of the two out"
        )
    temperature = TEMPERATURE if options.temperature is None else options.temperature
    if temperature < 0:
        raise InvalidConfig(
            f"--temperature is {temperature:g}; it must be 0, which is greedy, or more"
        )
    seed = options.seed
    if seed is not None and not 0 <= seed < 1 << 64:
        raise InvalidConfig(f"--seed is {seed}; it must be from 0 to 2**64 - 1")
    found = Sampler.greedy() if options.greedy else Sampler.temperature(temperature, seed)
    if options.top_k is not None:
        found = found.top_k(options.top_k)
    if options.top_p is not None:
        found = found.top_p(options.top_p)
    if options.repetition_penalty is not None:
        found = found.repetition_penalty(options.repetition_penalty)
    return found


def opened(options: argparse.Namespace) -> "Pretrained":
    """The model that the options name, on the device that they name.

    Raises:
        FastBrainError: there is no such model, or no such device.
    """
    import torch

    from fastbrain.training.pretrained import open_pretrained

    found = open_pretrained(options.model, options.tokenizer, options.step)
    can = torch.cuda.is_available() and torch.cuda.get_device_capability(0) >= (8, 0)
    if options.device == "cuda" or (options.device == "auto" and can):
        found.model.to_cuda()
    return found


def at_least(low: int, name: str, value: int) -> int:
    """`value`, or InvalidConfig where it is less than `low`."""
    if value < low:
        raise InvalidConfig(f"{name} is {value}; it must be at least {low}")
    return value


def note(text: str) -> None:
    """Say something that belongs to no result."""
    print(f"fastbrain: {text}", file=sys.stderr, flush=True)


def refusing(work: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Do a verb's work; returns its exit code, or that of a refusal, which is said in a line."""
    try:
        with _warnings_said():
            return work(options)
    except FastBrainError as error:
        note(str(error))
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


@contextmanager
def _warnings_said() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: note(f"warning: {message}")
        yield
