"""`fastbrain generate`: continue one prompt as the tokens come, or many at once."""

import argparse
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fastbrain.commands import generate_options, generate_prompts
from fastbrain.commands.generate_options import at_least, note
from fastbrain.commands.generate_prompts import Prompt
from fastbrain.commands.generate_text import Answer, Stops, write
from fastbrain.errors import InvalidConfig, TokenOutOfRange
from fastbrain.training.command import DONE, INTERRUPTED

if TYPE_CHECKING:
    from fastbrain.sampler import Sampler
    from fastbrain.training.pretrained import Pretrained

_EPILOG = """example:
  fastbrain generate runs/first --prompt "Once upon a time"
  fastbrain generate runs/first --prompts prompts.txt --greedy -n 64 --json
  fastbrain generate runs/first --prompt "What is rain?" --chat --temperature 0.7 --top-p 0.9

(for a run at runs/first, and a file of prompts.) One prompt is answered as the tokens come, and
several at once. An answer ends with the token that ends a text, at --stop, or after -n tokens.
With --json each answer is one line:
  {"prompt", "text", "ids", "finish_reason": "stop" or "length", "tokens", "tokens_per_s"}
An empty prompt begins a new text. A model without a tokenizer takes --prompt-ids and prints ids.
Exit codes: 0 done; 1 the output cannot be written; 2 refused; 130 interrupted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `generate`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    generate_options.add_model_arguments(parser)
    generate_prompts.add_arguments(parser)
    generate_options.add_sampler_arguments(parser)
    ending = parser.add_argument_group("where an answer ends")
    ending.add_argument(
        "-n", "--max-tokens", type=int, default=128, metavar="N", help="new tokens at most (128)"
    )
    ending.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT|ID",
        help="stop at this text, token or (a whole number) id; may be given again",
    )
    ending.add_argument(
        "--ignore-eos", action="store_true", help="go on after the token that ends a text"
    )
    parser.add_argument(
        "--batch", type=int, default=8, metavar="N", help="prompts answered at a time (8)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line and prompt")


def run(options: argparse.Namespace) -> int:
    """Generate what the options ask for; returns the exit code."""
    return generate_options.refusing(_generate, options)


def _generate(options: argparse.Namespace) -> int:
    n = at_least(1, "--max-tokens", options.max_tokens)
    batch = at_least(1, "--batch", options.batch)
    texts, ids = generate_prompts.given(options)
    sampler = generate_options.sampler(options)
    found = generate_options.opened(options)
    prompts, ends = generate_prompts.encoded(found, texts, ids, options)
    stops = _stops(options.stop, () if options.ignore_eos else ends, found)
    limits = [_limit(found, each, n, index) for index, each in enumerate(prompts)]
    if len(prompts) == 1 and not options.json:
        return _streamed(found, prompts[0], limits[0], sampler, stops)
    for index, (prompt, answer, seconds) in enumerate(
        _answered(found, prompts, limits, sampler, stops, batch)
    ):
        if options.json:
            write(json.dumps(_document(prompt, answer, seconds, found.files is None)) + "\n")
        else:
            shown = ",".join(map(str, prompt.ids)) if prompt.text is None else prompt.text
            write("\n---\n\n" * (index > 0) + f"[{shown}]{answer.text}\n")
    return DONE


def _stops(asked: list[str], ends: tuple[int, ...], found: "Pretrained") -> Stops:
    files, vocab_size = found.files, found.model.config.vocab_size
    ids, texts = set(ends), []
    for each in asked:
        special = None if files is None else files.tokenizer.token_to_id(each)
        if each.isascii() and each.isdigit():
            if int(each) >= vocab_size:
                raise TokenOutOfRange(int(each), vocab_size)
            ids.add(int(each))
        elif files is None:
            raise InvalidConfig(
                f"--stop is {each!r}, and a model without a tokenizer stops at ids alone"
            )
        elif not each:
            raise InvalidConfig("--stop is empty; give a text, a token or an id")
        elif special is not None and special in files.tokenizer.get_added_tokens_decoder():
            ids.add(special)
        else:
            texts.append(each)
    return Stops(frozenset(ids), tuple(texts))


def _limit(found: "Pretrained", prompt: Prompt, n: int, index: int) -> int:
    """How many tokens may follow a prompt."""
    # the last one is chosen but never read
    room = found.model.config.max_seq_len - len(prompt.ids) + 1
    if room < n:
        note(
            f"prompt {index + 1} has {len(prompt.ids)} tokens, so at most {room} can follow: the "
            f"model's max_seq_len is {found.model.config.max_seq_len}"
        )
    return min(n, room)


def _streamed(found: "Pretrained", prompt: Prompt, n: int, sampler: "Sampler", stops: Stops) -> int:
    answer = _answer(found, prompt, stops)

    def show(id: int) -> bool:
        write(answer.push(id))
        return not answer.stopped

    try:
        found.model.generate_with(prompt.ids, n, sampler, show)
        return DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        write(answer.end() + "\n")


def _answered(
    found: "Pretrained",
    prompts: list[Prompt],
    limits: list[int],
    sampler: "Sampler",
    stops: Stops,
    batch: int,
) -> Iterator[tuple[Prompt, Answer, float]]:
    """The prompts in order, with what follows each and the seconds that its batch took."""
    start = 0
    while start < len(prompts):
        # a batch has one limit
        end = start + 1
        while end < min(start + batch, len(prompts)) and limits[end] == limits[start]:
            end += 1
        group = prompts[start:end]
        began = time.perf_counter()
        rows = found.model.generate_batch(
            [each.ids for each in group], limits[start], sampler, tuple(stops.ids)
        )
        seconds = time.perf_counter() - began
        for prompt, ids in zip(group, rows, strict=True):
            answer = _answer(found, prompt, stops)
            for id in ids:
                answer.push(id)
                if answer.stopped:
                    break
            answer.end()
            yield prompt, answer, seconds
        start = end


def _answer(found: "Pretrained", prompt: Prompt, stops: Stops) -> Answer:
    return Answer(found.files.tokenizer if found.files else None, prompt.ids, stops)


def _document(prompt: Prompt, answer: Answer, seconds: float, ids_alone: bool) -> dict[str, Any]:
    return {
        "prompt": prompt.ids if prompt.text is None else prompt.text,
        "text": None if ids_alone else answer.text,
        "ids": answer.ids,
        "finish_reason": answer.finish_reason,
        "tokens": len(answer.ids),
        "tokens_per_s": round(len(answer.ids) / max(seconds, 1e-9), 2),
    }
