"""Rows of instruction data in the forms that data sets have them, as messages or as ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from fastbrain.tokens.json_line import kind_of
from fastbrain.tokens.json_rows import BadRow, Row

IGNORED = -100  # the label of a token that is not to be learned

_ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "tool": "tool",
}
# what a message may say besides its text, and no template here would be given
_UNREAD = ("tool_calls", "function_call", "reasoning_content", "thinking")


@dataclass(frozen=True)
class Conversation:
    """Messages, each with a `role` and a `content`; the last is the assistant's."""

    messages: list[dict[str, str]]


@dataclass(frozen=True)
class Tokenized:
    """Ids, and for each the same id as its label or -100."""

    ids: list[int]
    labels: list[int]


Content: TypeAlias = Conversation | Tokenized


class Format(NamedTuple):
    """A form of rows: its name, the fields that a row must have, and what reads it."""

    name: str
    fields: tuple[str, ...]
    read: Callable[[Row], Content]


def detect(row: Row) -> Format:
    """The form of a row, told by its fields; BadRow if it has none that is known."""
    for form in FORMATS:
        if all(field in row for field in form.fields):
            return form
    there = ", ".join(repr(key[:40]) for key in list(row)[:8]) or "no fields at all"
    known = "; ".join(" and ".join(form.fields) for form in FORMATS)
    raise BadRow("unknown format", f"it has {there}; a row must have one of these: {known}")


def read_row(form: Format, row: Row) -> Content:
    """What a row of this form says; BadRow where it lacks something or says it wrongly."""
    missing = [field for field in form.fields if field not in row]
    if missing:
        raise BadRow(
            "another format",
            f"it has no field {missing[0]!r}, but the rows before it are of the format "
            f"{form.name}; a data set may not mix formats",
        )
    found = form.read(row)
    if isinstance(found, Conversation):
        _check_messages(found.messages)
    return found


def _prompt_and(answer: str) -> Callable[[Row], Conversation]:
    def read(row: Row) -> Conversation:
        prompt, said = row["prompt"], row[answer]
        if isinstance(prompt, list) or isinstance(said, list):
            return Conversation(_side("prompt", prompt, "user") + _side(answer, said, "assistant"))
        return _pair(_text(prompt, "'prompt'"), _text(said, f"{answer!r}"))

    return read


def _side(field: str, value: Any, role: str) -> list[dict[str, str]]:
    """Messages, or a text as the only one."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return _messages(value, field, "role", "content", {each: each for each in _ROLES})


def _alpaca(row: Row) -> Conversation:
    more = row.get("input")
    asked = _text(row["instruction"], "'instruction'")
    if more is not None and _text(more, "'input'").strip():
        asked += "\n\n" + more
    return _pair(asked, _text(row["output"], "'output'"))


def _pair(prompt: str, response: str) -> Conversation:
    return Conversation(
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    )


def _chat(row: Row) -> Conversation:
    roles = {each: each for each in _ROLES}
    return Conversation(_messages(row["messages"], "messages", "role", "content", roles))


def _sharegpt(row: Row) -> Conversation:
    found = row["conversations"]
    return Conversation(_messages(found, "conversations", "from", "value", _SHAREGPT_ROLES))


def _tokenized(row: Row) -> Tokenized:
    ids, labels = (_integers(row[field], field) for field in ("input_ids", "labels"))
    if len(ids) != len(labels):
        raise BadRow(
            "bad labels",
            f"it has {len(ids)} input_ids and {len(labels)} labels; each id needs one label",
        )
    for at, (id, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (id, IGNORED):
            raise BadRow(
                "bad labels",
                f"label {at} is {label}, but the id there is {id}; a label is the id itself, or "
                f"{IGNORED} where nothing is to be learned (labels are not shifted)",
            )
    return Tokenized(ids, labels)


FORMATS = (
    Format("pre-tokenized", ("input_ids", "labels"), _tokenized),
    Format("messages", ("messages",), _chat),
    Format("ShareGPT", ("conversations",), _sharegpt),
    Format("Alpaca", ("instruction", "output"), _alpaca),
    Format("prompt and response", ("prompt", "response"), _prompt_and("response")),
    Format("prompt and completion", ("prompt", "completion"), _prompt_and("completion")),
)


def _messages(
    value: Any, field: str, role_key: str, text_key: str, roles: dict[str, str]
) -> list[dict[str, str]]:
    if not isinstance(value, list):
        raise BadRow("not messages", f"its field {field!r} is {kind_of(value)}, not a list")
    if not value:
        raise BadRow("empty", f"its field {field!r} has no messages")
    found = []
    for at, each in enumerate(value):
        what = f"message {at} of {field!r}"
        if not isinstance(each, dict):
            raise BadRow("not messages", f"{what} is {kind_of(each)}, not an object")
        for key in (role_key, text_key):
            if key not in each:
                raise BadRow("not messages", f"{what} has no {key!r}")
        unread = [key for key in _UNREAD if each.get(key)]
        if unread:
            raise BadRow("not messages", f"{what} has {unread[0]!r}, which is not supported")
        role = each[role_key]
        if not isinstance(role, str) or role not in roles:
            raise BadRow(
                "unknown role",
                f"the role of {what} is {_shown(role)}; it must be one of {', '.join(roles)}",
            )
        found.append({"role": roles[role], "content": _text(each[text_key], f"of {what}")})
    return found


def _check_messages(messages: Sequence[dict[str, str]]) -> None:
    for at, each in enumerate(messages):
        # a system message may be empty, as many data sets have it
        if not each["content"].strip() and each["role"] != "system":
            name = {"user": "prompt", "assistant": "response"}.get(each["role"], "message")
            raise BadRow("empty", f"the {name} in message {at} is empty or only white space")
    last = messages[-1]["role"]
    if last != "assistant":
        raise BadRow(
            "ends without a response",
            f"the conversation ends with a {last} message; it must end with a response",
        )


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BadRow("not a string", f"the text {what} is {kind_of(value)}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRow("not Unicode", f"the text {what} holds half of a surrogate pair") from error
    return value


def _integers(value: Any, field: str) -> list[int]:
    if not isinstance(value, list):
        raise BadRow("bad ids", f"its field {field!r} is {kind_of(value)}, not a list")
    for at, each in enumerate(value):
        if type(each) is not int:
            raise BadRow("bad ids", f"{field}[{at}] is {kind_of(each)}, not a whole number")
    if not value:
        raise BadRow("empty", f"its field {field!r} is empty")
    return value


def _shown(value: Any) -> str:
    return ascii(value[:40]) if isinstance(value, str) else kind_of(value)
