"""Jinja's sandbox with bounds, for templates that came with a model from somewhere.

The sandbox keeps a template from everything but the values it is given. The bounds stop it when
it loops for long, and refuse what would make a text of more than `MOST_CHARACTERS`. They are
looked at where a template loops, calls, prints, joins or multiplies.
"""

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_CHARACTERS = 1 << 26
MOST_STEPS = 10_000_000
MOST_SECONDS = 5.0
_MOST_BITS = 1 << 16
_WIDEST = 10_000
# five digits, a width that is an argument, or one format inside another
_WIDE = re.compile(r"[0-9]{5}|%[-+ #0-9.]*\*|\{[^{}]*\{")
# of no use in a conversation; the first two depend on chance
_LEFT_OUT = ("random", "shuffle", "batch", "center", "pprint", "slice", "urlize", "wordwrap")
BUDGET = "its budget"  # a name that a template cannot write, and so not change


class TooMuch(jinja2.TemplateError):
    """A template does more than one that renders a conversation would."""


class Budget:
    """What is left to a template in one rendering."""

    def __init__(self) -> None:
        self._steps = 0
        self._characters = 0
        self._until = time.monotonic() + MOST_SECONDS

    def step(self, characters: int = 0) -> None:
        """Count a step that prints so many characters; TooMuch if it is one too many."""
        self._steps += 1
        self._characters += characters
        if self._steps > MOST_STEPS or time.monotonic() > self._until:
            raise TooMuch(
                f"it did not end within {MOST_STEPS:,} steps and {MOST_SECONDS:g} seconds"
            )
        _check_size(self._characters)


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates, made by `bounded`, need a Budget as their `BUDGET`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in _LEFT_OUT:
            self.filters.pop(name, None)
        self.globals.pop("lipsum")
        self.filters = {name: _guarded(name, each) for name, each in self.filters.items()}
        self.filters |= {"counted": _counted, "sized": sized}

    def bounded(self, source: str) -> nodes.Template:
        """The syntax tree of a template, with its loops counting and its `~` looked at."""
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = through("counted", loop.iter)
        for node in [tree, *tree.find_all(nodes.Node)]:
            for field, value in list(node.iter_fields()):
                if isinstance(value, nodes.Concat):
                    setattr(node, field, through("sized", value))
                elif isinstance(value, list):
                    value[:] = [
                        through("sized", each) if isinstance(each, nodes.Concat) else each
                        for each in value
                    ]
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, int) and isinstance(other, str | list | tuple):
                    _check_size(one * len(other))
        elif operator == "%" and isinstance(left, str):
            _check_width(left)
        elif operator == "**" and not (abs(left) <= 1 << 32 and abs(right) <= 64):
            raise TooMuch(f"it asks for {left} ** {right}")
        return sized(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __function: Any, *args: Any, **kwargs: Any) -> Any:
        found = __context.resolve(BUDGET)
        assert isinstance(found, Budget)
        found.step()
        owner = getattr(__function, "__self__", "")
        _check_arguments(getattr(__function, "__name__", ""), owner, args, kwargs)
        return sized(super().call(__context, __function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        owner = getattr(value, "__self__", None)
        if isinstance(owner, str) and getattr(value, "__name__", "").startswith("format"):
            _check_width(owner)
        return super().wrap_str_format(value)


def through(name: str, value: Any) -> nodes.Filter:
    """The expression `value | name`."""
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def sized(value: Any) -> Any:
    """`value`, unless it is larger than anything that a template needs."""
    if isinstance(value, str | list | tuple):
        _check_size(len(value))
    elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise TooMuch("it computes a number of thousands of digits")
    return value


@jinja2.pass_context
def _counted(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    found = context.resolve(BUDGET)
    assert isinstance(found, Budget)
    for value in values:
        found.step()
        yield value


def _guarded(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    # Jinja's own filters say by this that they are given something before the value
    value_at = 1 if hasattr(filter, "jinja_pass_arg") else 0

    @functools.wraps(filter)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        value = args[value_at] if len(args) > value_at else ""
        _check_arguments(name, value, args[value_at + 1 :], kwargs)
        return sized(filter(*args, **kwargs))

    return guarded


def _check_arguments(name: str, owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse what `owner.name(*args)` or `owner | name(*args)` would make too large."""
    lines = owner.count("\n") + 1 if isinstance(owner, str) else 1
    for each in (*args, *kwargs.values()):
        if isinstance(each, int) and name not in ("range", "raise_exception"):
            _check_size(each * lines)
            if abs(each) > _WIDEST and isinstance(owner, str | list | tuple) and owner:
                raise TooMuch(f"it asks for {each} in {name}")
    if name == "format" and isinstance(owner, str):
        _check_width(owner)
    if name == "replace" and isinstance(owner, str) and len(args) > 1:
        _check_size(len(owner) + owner.count(str(args[0])) * len(str(args[1])))
    if name == "join":
        # of a string for its argument, of a filter for its value
        between, parts = (owner, args[0] if args else "") if isinstance(owner, str) else ("", owner)
        if isinstance(parts, list | tuple):
            texts = (len(each) for each in parts if isinstance(each, str))
            _check_size(sum(texts) + len(parts) * len(between))


def _check_size(size: int) -> None:
    if size > MOST_CHARACTERS:
        raise TooMuch(f"it makes a text of more than {MOST_CHARACTERS:,} characters")


def _check_width(text: str) -> None:
    if _WIDE.search(text):
        raise TooMuch("it formats a text to a width that is an argument or has five digits")
