"""Templates as programs: what they may do, what they say when they refuse, and where they stop."""

import pytest

from fastbrain.errors import InvalidConfig, InvalidDataset
from fastbrain.tokens import jinja_sandbox
from fastbrain.tokens.jinja_text import JinjaText

MESSAGES = [{"role": "user", "content": "a<b>"}, {"role": "assistant", "content": "c"}]


def rendered(source, **variables):
    return JinjaText(source).render(MESSAGES, False, variables)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ nothing }}|", "<s>|"),
        # a newline after a tag goes, and so does what is before one in its line
        ("{% if true %}\n  a\n   {% endif %}\nb\n", "  a\nb"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "a<b>"}'),
        ("{{ {'a': '\u00e9'} | tojson(indent=1) }}", '{\n "a": "\u00e9"\n}'),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "a<b>"),
        (
            "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}"
            "{{ loop.last }}{{ loop.nextitem is defined }};{% endfor %}",
            "1/2TrueFalseTrue;2/2FalseTrueFalse;",
        ),
        ("{% for k, v in messages[0].items() %}{{ k }}{% break %}{% endfor %}", "role"),
        ("{% for x in nothing %}{{ x }}{% else %}none{% endfor %}", "none"),
        ("{% set x = namespace(n=0) %}{% set x.n = 2 + 3 * 2 %}{{ x.n ~ '%d' % 7 }}", "87"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{% endgeneration %}{{ x }}", "1"),
        ("{{ tools is none and documents is none and not add_generation_prompt }}", "True"),
    ],
)
def test_templates_render_as_those_of_transformers_do(source, text):
    assert rendered(source, bos_token="<s>") == text


def test_the_time_is_told():
    assert rendered("{{ strftime_now('%Y') }}").startswith("2")


def test_generation_blocks_are_marked_also_in_a_macro():
    source = (
        "{% macro turn(m) %}{% if m.role != 'user' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% endif %}{% endmacro %}"
        "{% for m in messages %}<{{ turn(m) }}>{% endfor %}"
    )
    template = JinjaText(source)
    assert template.has_generation
    assert template.render(MESSAGES, False, {}, ("(", ")")) == "<><(c)>"
    assert not JinjaText("{# generation #}").has_generation


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("a\n{% if %}", "not valid: .*, in its line 2"),
        ("{% for x in y %}", "not valid"),
        ("{% generation %}", "not valid"),
        ("{{ 'a' | nonsense }}", "not valid: No filter named 'nonsense'"),
    ],
)
def test_a_text_that_is_no_template_is_refused(source, reason):
    with pytest.raises(InvalidConfig, match=reason):
        JinjaText(source)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('no \x1b[1m system ' ~ messages[0].role) }}", r"no \\x1b\[1m system"),
        ("{{ messages[5].content.x }}", "fails on the conversation: .*no element 5"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages + 1 }}", "fails"),
        ("{{ none.x.y }}", "fails"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_what_a_template_refuses_or_fails_on_is_said(source, reason):
    with pytest.raises(InvalidDataset, match=reason):
        rendered(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ raise_exception.__globals__['json'].x }}",
        "{{ '{0.__class__.__mro__[1].x}'.format(1) }}",
        "{% include 'other' %}",
    ],
)
def test_the_sandbox_holds(source):
    with pytest.raises(InvalidDataset, match="fails on the conversation"):
        rendered(source)


LOOP = "{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(9999) %}" + LOOP,
        "{% macro f() %}{{ f() }}{% endmacro %}" + "{% for a in range(9999) %}" * 3
        + "x" + "{% endfor %}" * 3,
        "{% set n = namespace(s='ab') %}{% for i in range(24) %}{% set n.s = n.s ~ n.s %}"
        "{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(24) %}{% set n.s = n.s + n.s %}"
        "{% endfor %}",
        "{{ 'ab' * 10**12 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% set n = namespace(s=9) %}{% for i in range(20) %}{% set n.s = n.s * n.s %}"
        "{% endfor %}",
        "{{ '{:{}}'.format(1, '1000000000') }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ (['a' * 99999] * 9999) | join }}",
        "{{ ('a' * 9999).join(['a'] * 9999) }}",
        "{{ [1] * 10**12 }}",
        "{{ 'a'.ljust(10**12) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ range(10**12) }}",
        "{{ ('a' * 9999).replace('', 'b' * 99999) }}",
        "{{ 'a' | center(10**12) }}",
        "{{ 'a' | indent(10**12) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ [1] | tojson(indent=10**12) }}",
    ],
)  # fmt: skip
def test_a_template_cannot_run_away(source, monkeypatch):
    monkeypatch.setattr(jinja_sandbox, "MOST_STEPS", 100_000)
    monkeypatch.setattr(jinja_sandbox, "MOST_CHARACTERS", 1 << 20)
    with pytest.raises((InvalidDataset, InvalidConfig)):
        rendered(source)


def test_a_slow_template_is_stopped(monkeypatch):
    monkeypatch.setattr(jinja_sandbox, "MOST_SECONDS", 0.05)
    with pytest.raises(InvalidDataset, match=r"did not end within 10,000,000 steps and 0.05 sec"):
        rendered("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
