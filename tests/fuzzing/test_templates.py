"""Chat templates are untrusted programs: each ends, in bounded time, with a prompt or one sentence of error."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest
from hypothesis import strategies as st

from headgate.errors import BrokenCheckpoint, RequestError
from headgate.text.sandbox import TemplateLimits
from headgate.text.template import ChatTemplate
from tests.fuzzing.properties import damaged, fuzzed, odd_text, odd_values

LIMITS = TemplateLimits(chars=20_000, chars_in_all=200_000, seconds=0.3)
USER = {"role": "user", "content": "hi"}

# ------------------------------------------------------------------------------------------------- programs at random

NAMES = (
    "messages",
    "tools",
    "ns",
    "a",
    "b",
    "ns.x",
    "loop",
    "messages[0]",
    "bos_token",
    "self",
    "dict",
    "range",
    "f",
)
LITERALS = (
    "0",
    "1",
    "-7",
    "2.5",
    "99999",
    "'x'",
    "'é%s{}'",
    "'a\\nb'",
    "[]",
    "{}",
    "()",
    "none",
    "true",
    "[1, 'b', [2]]",
    "{'k': [1]}",
)
BINARY = (
    "+",
    "-",
    "*",
    "/",
    "//",
    "%",
    "**",
    "~",
    "==",
    "!=",
    "<",
    ">=",
    "in",
    "not in",
    "and",
    "or",
    "is eq",
    "is in",
)
FILTERS = (
    """
    abs|attr('__class__')|capitalize|count|default(1)|dictsort|e|escape|first|float|groupby(0)|indent(3)|int
    int(base=16)|items|join(',')|last|length|list|lower|map('upper')|map(attribute='role')|max|min|reject('none')
    replace('a', 'bb')|reverse|round|safe|select('string')|selectattr('role', 'eq', 'user')|sort|sort(attribute='role')
    string|sum|title|tojson|tojson(indent=2)|trim|unique|upper|wordcount
""".strip()
    .replace("\n", "|")
    .split("|")
)
METHODS = [
    "append(1)",
    "capitalize()",
    "center(9)",
    "count('a')",
    "encode()",
    "endswith('a')",
    "find('a')",
    "format(1)",
    "get('k')",
    "index('a')",
    "items()",
    "join('ab')",
    "keys()",
    "ljust(99)",
    "pop()",
    "replace('a','aa')",
    "split()",
    "splitlines()",
    "startswith('a')",
    "strip()",
    "title()",
    "update({})",
    "upper()",
    "values()",
    "zfill(9)",
    "__class__",
    "__init__",
    "__globals__",
    "_x",
    "mro()",
    "to_bytes(9)",
    "x",
    "role",
]


def bigger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(BINARY), inner),
        st.builds("({}) | {}".format, inner, st.sampled_from(FILTERS)),
        st.builds("({}).{}".format, inner, st.sampled_from(METHODS)),
        st.builds("({})[{}]".format, inner, inner),
        st.builds("({})[{}:]".format, inner, inner),
        st.builds("[{0}, {0}, {1}]".format, inner, inner),
        st.builds("({0}, {0})".format, inner),
        st.builds("{{{}: {}}}".format, inner, inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("namespace(x={})".format, inner),
        st.builds("range({})".format, inner),
        st.builds("f({})".format, inner),
        st.builds("not {}".format, inner),
    )


expressions = st.recursive(st.sampled_from(NAMES + LITERALS), bigger, max_leaves=8)


def longer(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("{{% set a = {} %}}{}".format, expressions, inner),
        st.builds("{{% set ns.x = {} %}}{}".format, expressions, inner),
        st.builds("{{% for i in {} %}}{}{{% endfor %}}".format, expressions, inner),
        st.builds("{{% for i in range(999) %}}{{% set ns.x = {} %}}{}{{% endfor %}}".format, expressions, inner),
        st.builds("{{% if {} %}}{}{{% else %}}{}{{% endif %}}".format, expressions, inner, inner),
        st.builds("{{% macro f(x) %}}{}{{% endmacro %}}{}".format, inner, inner),
        st.builds("{{% generation %}}{}{{% endgeneration %}}".format, inner),
    )


outputs = st.one_of(
    st.builds("{{{{ {} }}}}".format, expressions),
    st.sampled_from(("text", "{% break %}", "{{ raise_exception(ns) }}")),
)
programs = st.recursive(outputs, longer, max_leaves=6)
START = "{% set ns = namespace(x=['ab']) %}"


def rendered(source: str, messages: list[Any] | None = None, limits: TemplateLimits = LIMITS, **more: Any) -> str:
    """The prompt, or the error message of the refusal."""
    try:
        return ChatTemplate(source, limits=limits).render(messages or [USER], **more)
    except (RequestError, BrokenCheckpoint) as error:
        return str(error)


@fuzzed(programs, few=30)
def test_any_program_ends_with_a_prompt_or_a_sentence(source: str) -> None:
    assert len(rendered(START + source)) <= LIMITS.chars + 300


@fuzzed(
    damaged(b"{% for m in messages %}{{ m.role ~ '\\n' }}{% if m.x %}{{ m | tojson }}{% endif %}{% endfor %}"), few=20
)
def test_a_damaged_template_renders_or_is_refused_by_name(source: bytes) -> None:
    rendered(source.decode(errors="replace"))


@fuzzed(st.tuples(st.lists(odd_values, min_size=1, max_size=3), odd_values), few=20)
def test_any_message_is_rendered_or_refused(drawn: tuple[list[Any], Any]) -> None:
    contents, extra = drawn
    messages = [{"role": "user", "content": content, "tool_calls": []} for content in contents]
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.content | tojson }}{% endfor %}{{ x }}"
    rendered(source, messages, x=extra)


@fuzzed(
    st.one_of(
        odd_text,
        st.binary(max_size=40).map(
            lambda data: data.decode("utf-8", "surrogatepass") if data.isascii() else "\ud800"
        ),
    ),
    few=20,
)
def test_tool_call_arguments_are_parsed_or_left_unchanged(arguments: str) -> None:
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    rendered("{{ messages[0].tool_calls | tojson }}", [{"role": "assistant", "content": "", "tool_calls": calls}])


# -------------------------------------------------------------------------------------------- what was found to be open

# A list that contains the previous one ten times, forty levels deep: cheap to build, endless to traverse.
ENDLESS = "{% set a = ['aaaa'] %}" + "{% set a = [a, a, a, a, a, a, a, a, a, a] %}" * 40
TWINS = ENDLESS + "{% set b = ['aaaa'] %}" + "{% set b = [b, b, b, b, b, b, b, b, b, b] %}" * 40
TUPLES = "{% set a = ('a',) %}" + "{% set a = (a, a, a, a, a, a, a, a, a, a) %}" * 40
LONG = "{% set x = ('f' * 2000000) | int(base=16) %}{% set y = ('f' * 999999) | int(base=16) %}"


def repeated(first: str, then: str, times: int = 9999) -> str:
    loop = "{{% set ns = namespace(x={}) %}}{{% for i in range({}) %}}{{% set ns.x = {} %}}{{% endfor %}}"
    return loop.format(first, times, then)


HOSTILE = {
    "show the values of an object": ENDLESS + "{{ {'x': a}.values() }}",
    "show the items of an object": ENDLESS + "{{ {'x': a}.items() }}",
    "show a namespace": ENDLESS + "{{ namespace(x=a) }}",
    "write it large": ENDLESS + "{{ a | upper }}",
    "mark it as safe": ENDLESS + "{{ a | safe }}",
    "count its words": ENDLESS + "{{ a | wordcount }}",
    "join with it": ENDLESS + "{{ ['a', 'b'] | join(a) }}",
    "complain with it": ENDLESS + "{{ raise_exception(a) }}",
    "compare it": TWINS + "{{ a == b }}",
    "search for it": TWINS + "{{ a in [b] }}",
    "find its index": TWINS + "{{ [b].index(a) }}",
    "test it": TWINS + "{{ a is eq(b) }}",
    "select by it": TWINS + "{{ [b] | select('equalto', a) | list | length }}",
    "sort it": TWINS + "{{ [a, b] | sort | length }}",
    "find the largest": TWINS + "{{ [a, b] | max | length }}",
    "hash it": TUPLES + "{{ {a: 1} | length }}",
    "look it up": TUPLES + "{{ {}[a] }}",
    "get it": TUPLES + "{{ {}.get(a) }}",
    "make an object of it": TUPLES + "{{ dict([(a, 1)]) | length }}",
    "make it unique": TUPLES + "{{ [a, a] | unique | list | length }}",
    "divide long numbers": LONG + "{{ x // y > 1 }}",
    "multiply long numbers": repeated("3", "ns.x * ns.x") + "{{ ns.x > 1 }}",
    "add up long numbers": repeated("3", "ns.x + ns.x") + "{{ ns.x > 1 }}",
    "indent deeply": repeated("[1] * 9000", "[ns.x]", 190) + "{{ ns.x | tojson(indent=16) }}",
    "separate widely": "{{ ([1] * 9000) | tojson(separators=('x' * 9000, ':')) }}",
    "format a date at length": "{{ strftime_now('%c' * 9000) }}",
}


@pytest.mark.parametrize("attempt", sorted(HOSTILE))
def test_a_hostile_template_takes_bounded_time(attempt: str) -> None:
    assert len(rendered(HOSTILE[attempt])) <= LIMITS.chars + 300


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hostile_template_takes_little_memory() -> None:
    program = """
        import resource, time
        from tests.fuzzing.test_templates import HOSTILE, rendered
        from headgate.text.sandbox import TemplateLimits
        rendered("{{ 1 }}")
        for name, source in HOSTILE.items():
            began_s = time.thread_time()
            assert len(rendered(source, limits=TemplateLimits(chars=400_000, chars_in_all=20_000_000))) <= 410_000, name
            assert time.thread_time() - began_s < 20, name
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 500_000  # kilobytes


TOO_DEEP = {
    "brackets": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "conditions": "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "loops": "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
    "a sum": "{{ " + "+".join(["1"] * 5000) + " }}",
    "a number": "{{ " + "1" * 5000 + " }}",
}


@pytest.mark.parametrize("kind", sorted(TOO_DEEP))
def test_a_template_that_cannot_be_compiled_is_named(kind: str) -> None:
    with pytest.raises(BrokenCheckpoint, match="chat template 'default'"):
        ChatTemplate(TOO_DEEP[kind])


def test_constructs_of_common_templates_are_allowed() -> None:
    """The constructs that templates of common models use."""
    source = """
{%- set ns = namespace(found=false, last=messages[-1]) %}
{%- for m in messages %}
    {%- if m == ns.last and loop.index0 - 1 != messages | length %}
        {{- m.role + ': ' + m['content'] | trim }}
    {%- elif m.role in ['user', 'system'] and not ns.found %}
        {%- set ns.found = true %}
        {{- {m.role: m.content} | tojson(indent=4) }}
    {%- endif %}
{%- endfor %}
{{- messages | map(attribute='role') | unique | sort | join(',') }}
{{- ' ' ~ (2 ** 10 + 7 // 2 - 3 % 2) }}
{%- if 'x' in messages[0].content.split(' ') %}
    {{- messages[0].items() | list | length }}
{%- endif %}"""
    prompt = ChatTemplate(source).render([{"role": "system", "content": "x y"}, USER])
    assert prompt == '{\n    "system": "x y"\n}user: hisystem,user 10262'


def test_a_date_format_is_short() -> None:
    """Each character of a date format may expand to two hundred and fifty characters of text."""
    assert "a date format of 18000 characters is too long" in rendered(HOSTILE["format a date at length"])
