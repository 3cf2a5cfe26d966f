"""Chat templates as text: rendered as transformers does, with marks where the model speaks."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context

from fastbrain.errors import InvalidConfig, InvalidDataset
from fastbrain.tokens.jinja_sandbox import BUDGET, Budget, Sandbox, through

_LONGEST_SAID = 300
_MARKS = "its marks"  # a name that a template cannot write


class JinjaText:
    """A compiled template.

    Attributes:
        has_generation: whether it marks what the model says by `{% generation %}` blocks.

    Raises InvalidConfig for what is no template.
    """

    def __init__(self, source: str) -> None:
        environment = Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters |= {"tojson": _tojson, "generation_mark": _generation_mark}
        environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        try:
            tree = environment.bounded(source)
            code = environment.compile(tree)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidConfig(
                f"the chat template is not valid: {_said(error)}, in its line {error.lineno}"
            ) from error
        except (jinja2.TemplateError, RecursionError, ValueError, SyntaxError) as error:
            raise InvalidConfig(f"the chat template is not valid: {_said(error)}") from error
        filters = tree.find_all(nodes.Filter)
        self.has_generation = any(each.name == "generation_mark" for each in filters)
        self._template = jinja2.Template.from_code(environment, code, environment.globals)

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool,
        variables: Mapping[str, str],
        marks: tuple[str, str] = ("", ""),
    ) -> str:
        """The conversation as text; `marks` are put where generation blocks begin and end.

        InvalidDataset for a conversation that the template refuses or fails on.
        """
        budget = Budget()
        context = {
            **variables,
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            BUDGET: budget,
            _MARKS: marks,
        }
        pieces: list[str] = []
        try:
            for piece in self._template.generate(context):
                budget.step(len(piece))
                pieces.append(piece)
        except _Refused as error:
            raise InvalidDataset(
                f"the chat template refuses the conversation: {_said(error)}"
            ) from error
        except Exception as error:  # whatever a program can run into
            raise InvalidDataset(
                f"the chat template fails on the conversation: {_said(error)}"
            ) from error
        return "".join(pieces)


class _Refused(jinja2.TemplateError):
    """What a template says by `raise_exception`."""


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: what is inside is what the model says."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope([_mark(0, line), *body, _mark(1, line)], lineno=line)


def _mark(which: int, line: int) -> nodes.Node:
    mark = through("generation_mark", nodes.Const(which, lineno=line))
    return nodes.Output([mark], lineno=line)


@jinja2.pass_context
def _generation_mark(context: Context, which: int) -> str:
    marks: Any = context.resolve(_MARKS)
    return str(marks[which])


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and indent > 100:
        raise _Refused(f"tojson is asked to indent by {indent}")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _raise(message: str) -> NoReturn:
    raise _Refused(message)


def _said(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
    return shown if len(shown) <= _LONGEST_SAID else shown[: _LONGEST_SAID - 3] + "..."
