"""`fastbrain chat`: talk to a model, at a terminal or from a script."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from fastbrain.commands import chat_lines, generate_options, generate_prompts
from fastbrain.commands.generate_options import at_least, note
from fastbrain.commands.generate_text import write
from fastbrain.errors import FastBrainError, InvalidConfig
from fastbrain.training.command import DONE

if TYPE_CHECKING:
    from fastbrain.commands.chat_session import Reply, Session

_EPILOG = """example:
  fastbrain chat runs/first
  fastbrain chat runs/first --system "You answer in one sentence." --temperature 0.5
  echo "What is rain?" | fastbrain chat runs/first --json

(for a run at runs/first; best one that was trained by `fastbrain sft`.) Ctrl-C stops an answer, and
Ctrl-D leaves. With --json, standard input is one message a line, as plain text or as {"role",
"content"}, and each answer is one line:
  {"role", "content", "finish_reason", "tokens", "tokens_per_s", "dropped"}
Where the conversation outgrows the model, its oldest turns are forgotten, which is said.
Exit codes: 0 done; 1 the output cannot be written; 2 refused; 130 interrupted."""

_HELP = """\
/reset        forget the conversation
/undo         forget the last question and its answer
/system TEXT  what the system says before all else; without TEXT, shows it
/exit         leave
/help         this"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `chat`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    generate_options.add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the system says before all else")
    parser.add_argument(
        "-n", "--max-tokens", type=int, default=512, metavar="N", help="of an answer (512)"
    )
    generate_options.add_sampler_arguments(parser)
    parser.add_argument("--json", action="store_true", help="messages in, one object a line out")


def run(options: argparse.Namespace) -> int:
    """Talk until the input ends; returns the exit code."""
    return generate_options.refusing(_chat, options)


def _chat(options: argparse.Namespace) -> int:
    n = at_least(1, "--max-tokens", options.max_tokens)
    sampler = generate_options.sampler(options)
    found = generate_options.opened(options)
    if sys.stdin is None:
        raise InvalidConfig("standard input is closed, and what to answer is read from it")
    if found.files is None:
        raise InvalidConfig(f"{found.source} has no tokenizer beside it: name one with --tokenizer")
    from fastbrain.commands.chat_session import Session

    session = Session(found.model, found.files, sampler, n, options.system)
    generate_prompts.note_template(found.files)
    if options.json:
        return _scripted(session)
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        write(f"{found.source}\n/help lists the commands\n")
    for line in chat_lines.typed() if at_terminal else chat_lines.piped():
        if line.startswith("/"):
            if not _obey(line, session):
                break
        elif line.strip():
            _answer(line, session)
    return DONE


def _answer(line: str, session: "Session") -> None:
    try:
        reply = session.ask(line, write)
    except FastBrainError as error:
        note(str(error))
        return
    write("\n")
    _say_dropped(reply)
    if reply.finish_reason == "length":
        note("(the answer was cut: it may be longer with a larger --max-tokens, or after /reset)")


def _obey(line: str, session: "Session") -> bool:
    """Carries out a command; False to leave."""
    word, _, rest = line.partition(" ")
    match word:
        case "/exit":
            return False
        case "/help":
            write(_HELP + "\n")
        case "/reset":
            session.reset()
            write("(forgotten)\n")
        case "/undo":
            write("(forgotten)\n" if session.undo() else "(there is nothing to undo)\n")
        case "/system":
            if rest.strip():
                session.set_system(rest.strip())
            write(f"(system: {session.system or 'says nothing'})\n")
        case _:
            write(f"(there is no {word}; /help lists the commands)\n")
    return True


def _scripted(session: "Session") -> int:
    for message in chat_lines.messages():
        if message["role"] == "system":
            session.set_system(message["content"])
        elif message["role"] == "assistant":
            session.messages.append(message)
        else:
            reply = session.ask(message["content"], lambda piece: None)
            _say_dropped(reply)
            document = {
                "role": "assistant",
                "content": reply.content,
                "finish_reason": reply.finish_reason,
                "tokens": reply.tokens,
                "tokens_per_s": round(reply.tokens / max(reply.seconds, 1e-9), 2),
                "dropped": reply.dropped,
            }
            write(json.dumps(document) + "\n")
            if reply.finish_reason == "interrupted":
                raise KeyboardInterrupt
    return DONE


def _say_dropped(reply: "Reply") -> None:
    if reply.dropped:
        note(
            f"the conversation outgrew the model: its {reply.dropped} oldest messages are forgotten"
        )
