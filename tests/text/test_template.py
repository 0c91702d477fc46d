from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from headgate.errors import BrokenCheckpoint, RequestError
from headgate.text.sandbox import TemplateLimits
from headgate.text.template import ChatTemplate, load_template
from tests.text.conftest import byte_level
from tests.text.test_tokenizer import save

CHATML = """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system_message = messages[0].content %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
<|start_header_id|>system<|end_header_id|>

Cutting Knowledge Date: December 2023
{% if tools is not none %}
{{- 'Respond with JSON: {"name": ..., "parameters": ...}.\\n\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}<|eot_id|>
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' ~ message['role'] ~ '<|end_header_id|>\\n\\n' ~ message['content'] | trim ~ '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
{% generation %}{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}}{% endgeneration %}
    {%- else %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
MISTRAL = """\
{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("After the optional system message, roles must alternate user/assistant/...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message.role == "user" %}
        {{- "[INST] " ~ message.content ~ "[/INST]" }}
    {%- else %}
        {{- " " + message.content + eos_token }}
    {%- endif %}
    {%- if loop.index > 100 %}{% break %}{% endif %}
{%- endfor %}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL}

TOOL = {"type": "function", "function": {"name": "weather", "description": "of <Zürich> & 'more'", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
USER = {"role": "user", "content": " What is 2 < 3? "}
CHATS = {
    "one question": [USER],
    "a system message": [{"role": "system", "content": "Be brief."}, USER],
    "a dialogue": [USER, {"role": "assistant", "content": "Yes 😀"}, {"role": "user", "content": "Why?"}],
    "a tool call": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": {"degrees": 12}},
    ],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "a generation prompt": {"add_generation_prompt": True},
    "no generation prompt": {"add_generation_prompt": False},
    "tools": {"add_generation_prompt": True, "tools": [TOOL]},
    "an extra variable": {"add_generation_prompt": True, "enable_thinking": False},
    "a message to continue": {"add_generation_prompt": False, "continue_final_message": True},
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(save(tmp_path_factory.mktemp("reference"), byte_level()))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_are_those_of_transformers(reference: Any, template: str, chat: str, option: str) -> None:
    ours = ChatTemplate(TEMPLATES[template], variables={"bos_token": "<s>", "eos_token": "</s>"})

    def render() -> str:
        return ours.render(CHATS[chat], **OPTIONS[option])

    try:
        expected = reference.apply_chat_template(
            CHATS[chat], chat_template=TEMPLATES[template], tokenize=False, **OPTIONS[option]
        )
    except Exception:  # jinja's errors and others: the template refuses, and so must ours
        with pytest.raises(RequestError):
            render()
    else:
        assert render() == expected


def test_an_error_raised_by_a_template_reaches_the_caller() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        ChatTemplate(MISTRAL, variables={"bos_token": "", "eos_token": ""}).render([USER, USER])


def test_arguments_of_tool_calls_may_be_json_text() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
    template = ChatTemplate(LLAMA3, variables={"bos_token": ""})
    as_text, as_object = (
        template.render([USER, {"role": "assistant", "content": "", "tool_calls": [each]}]) for each in (call, CALL)
    )
    assert as_text == as_object


CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}{% endfor %}"


def with_arguments(arguments: str, source: str = CALLS) -> str:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return ChatTemplate(source).render([USER, {"role": "assistant", "content": "", "tool_calls": [call]}])


@pytest.mark.parametrize(
    "arguments", ['{"city": "Zür', "city=Zürich", "[" * 100_000, "[" * 300 + "1,2" + "]" * 300, "9" * 5000]
)
def test_invalid_arguments_reach_the_template_unchanged(arguments: str) -> None:
    assert with_arguments(arguments) == arguments


def test_a_prompt_with_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match="not be valid text"):
        with_arguments('"\\ud800"')


def test_an_error_that_quotes_half_a_surrogate_pair_can_still_be_sent() -> None:
    with pytest.raises(RequestError, match="odd") as raised:
        with_arguments('"\\ud800"', "{{ raise_exception('odd: ' ~ messages[1].tool_calls[0].function.arguments) }}")
    raised.value.message.encode()


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


DEEP = nested(700)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"messages": [USER | {"content": DEEP}]}, "messages"),
        ({"messages": [USER], "tools": [{"function": DEEP}]}, "tools"),
        ({"messages": [USER], "documents": [{"text": DEEP}]}, "documents"),
        ({"messages": [USER], "style": DEEP}, "chat_template_kwargs"),
    ],
)
def test_values_nested_too_deep_are_refused_by_the_name_of_their_field(given: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match="nested more than 200 deep") as raised:
        ChatTemplate(CHATML).render(**given)
    assert raised.value.param == param


def test_text_parts_are_joined_for_a_template_that_accepts_only_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "one\ntwo" in ChatTemplate(CHATML).render([{"role": "user", "content": parts}])
    with pytest.raises(RequestError, match="text only"):
        ChatTemplate(CHATML).render([{"role": "user", "content": [{"type": "image_url"}]}])


def test_parts_stay_parts_for_a_template_that_supports_them() -> None:
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ChatTemplate(source).render([{"role": "user", "content": parts}]) == "[one][two]"


def test_a_template_sees_the_configured_date() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render([USER]) == "26 Jul 2024"


def test_templates_are_found_wherever_a_checkpoint_may_keep_them(tmp_path: Path) -> None:
    assert load_template(tmp_path) is None
    named = [{"name": "default", "template": "config {{ bos_token }}"}, {"name": "tool_use", "template": "tools"}]
    config = {"chat_template": named, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert rendered(tmp_path) == "config <s>"
    assert rendered(tmp_path, tools=[TOOL]) == "tools"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert rendered(tmp_path) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert rendered(tmp_path) == "jinja"


def rendered(folder: Path, **options: Any) -> str:
    template = load_template(folder)
    assert template is not None
    return template.render([USER], **options)


def test_a_template_that_is_not_jinja_is_named_with_its_line() -> None:
    with pytest.raises(BrokenCheckpoint, match="line 2"):
        ChatTemplate("ok\n{% for %}")


GROW = "{% set ns = namespace(x=['ab'], s='ab') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
KEEP = "{{% set ns = namespace(kept=[]) %}}{{% set s = 'a' * 90000 %}}"
KEEP += "{{% for i in range(999) %}}{{% set ns.kept = ns.kept + [{}] %}}{{% endfor %}}"
ESCAPES = {
    "read a file": "{% include '/etc/passwd' %}",
    "import a module": "{% import 'os' as os %}",
    "reach a class": "{{ ''.__class__.__mro__ }}",
    "reach a class by filter": "{{ (messages | attr('__class__')).mro() }}",
    "reach globals": "{{ cycler.__init__.__globals__ }}",
    "plant a class": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "change its input": "{{ messages.append(1) }}",
}
ENDLESS = {
    "loop in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "call itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "call itself twice": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}
HUGE = {
    "make a long range": "{{ range(10**9) | list }}",
    "repeat text": "{{ 'a' * 10**9 }}",
    "repeat a list": "{{ [0] * 10**9 }}",
    "make a large number": "{{ (9**999)**999 }}",
    "double text by +": GROW + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "double text by ~": GROW + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "double text by method": GROW + "{% set ns.s = ns.s.replace('a', 'aa') %}{% endfor %}",
    "double text by filter": GROW + "{% set ns.s = ns.s | replace('a', 'aa') %}{% endfor %}",
    "show a list of itself": GROW + "{% endfor %}{{ ns.x }}",
    "join a list of itself": GROW + "{% endfor %}{{ ns.x | join }}",
    "dump a list of itself": GROW + "{% endfor %}{{ ns.x | tojson }}",
    "pad text": "{{ 'a'.ljust(10**9) }}",
    "indent text": "{{ 'a' | indent(10**9, true) }}",
    "indent JSON": "{{ [1] | tojson(indent=10**9) }}",
    "format text": "{{ '{:1000000000}'.format(1) }}",
    "format text the old way": "{{ '%1000000000d' % 1 }}",
    "join far apart": "{{ ('b' * 90000).join(['a'] * 90000) }}",
    "keep much": "{{ range(99999) | map('string') | map('indent', 9999, true) | list | length }}",
    "make bytes of text": "{{ ('a'.encode() * 10**9) | length }}",
    "make bytes of a number": "{{ (1).to_bytes(10**9, 'big') | length }}",
    "add up lists": "{{ ([[1]] * 90000) | sum(start=[]) | length }}",
    "keep slices": KEEP.format("s[1:]"),
    "keep what a method makes": KEEP.format("s.upper()"),
    "keep what a filter makes": KEEP.format("s | list"),
    "print much": "{% for i in range(99999) %}aaaaaaaaaaaaaaaaaaaaa{% endfor %}",
}


def refused(source: str, why: str, *, seconds: float = 0.1) -> None:
    limits = TemplateLimits(chars=100_000, chars_in_all=5_000_000, seconds=seconds)
    with pytest.raises(RequestError, match=why):
        ChatTemplate(source, limits=limits).render([USER])


@pytest.mark.parametrize("attempt", ESCAPES)
def test_a_template_cannot_leave_the_sandbox(attempt: str) -> None:
    refused(ESCAPES[attempt], "unsafe|undefined|no loader|cannot hold")


@pytest.mark.parametrize("attempt", ENDLESS)
def test_a_template_cannot_run_for_ever(attempt: str) -> None:
    refused(ENDLESS[attempt], r"ran for more than 0\.1 s|calls itself without end")


def test_only_cpu_time_of_the_template_is_counted() -> None:
    def late() -> datetime:
        time.sleep(0.3)  # as a machine that is busy with something else
        return datetime(2026, 1, 2)

    template = ChatTemplate(
        "{{ strftime_now('%Y') }}{{ messages | length }}", limits=TemplateLimits(seconds=0.1), now=late
    )
    assert template.render([USER]) == "20261"


def test_the_clock_is_checked_while_long_numbers_are_added() -> None:
    template = ChatTemplate("{{ ([2**2000] * 900000) | sum | string | length }}", limits=TemplateLimits(seconds=0.01))
    began = time.thread_time()
    with pytest.raises(RequestError, match=r"ran for more than 0\.01 s"):
        template.render([USER])
    assert time.thread_time() - began < 2  # and not minutes


@pytest.mark.parametrize("attempt", HUGE)
def test_a_template_cannot_expand_a_small_input_without_limit(attempt: str) -> None:
    refused(HUGE[attempt], "characters|not allowed|too wide|Range too big|unsafe|argument 'start'|bits", seconds=60)
