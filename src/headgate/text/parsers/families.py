"""The model families whose answers are parsed, and how a family is recognised by its chat template.

With `auto`, the first row that is recognised is chosen. The names are those of the flags `--reasoning-parser` and
`--tool-parser`. Special tokens in `markers` stay in the text that the parser reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from headgate.text.parsers import deepseek_calls, harmony, pythonic_calls
from headgate.text.parsers.deepseek_calls import DeepSeekCalls
from headgate.text.parsers.json_calls import GRANITE, HERMES, LLAMA, MISTRAL, JsonCalls, Markup
from headgate.text.parsers.pythonic_calls import PythonicCalls
from headgate.text.parsers.scanner import Parser
from headgate.text.parsers.tagged_calls import GlmCalls, QwenCoderCalls
from headgate.text.parsers.thinking import Tags
from headgate.text.parsers.typed_values import Declared

MakeParser = Callable[[Declared, str], Parser]  # from the schemas of the tools and the seed of the calls' ids
HARMONY: Final = "gpt_oss"  # one grammar for reasoning and calls


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFamily:
    name: str
    models: str  # examples
    syntax: str
    signs: tuple[str, ...]  # all of them are in the template
    tags: Tags | None = None  # None: harmony

    @property
    def markers(self) -> tuple[str, ...]:
        return harmony.MARKERS if self.tags is None else self.tags.all


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFamily:
    name: str
    models: str  # examples
    syntax: str
    signs: tuple[str, ...]  # one of them is in the template
    make: MakeParser
    markup: Markup = HERMES  # of calls that a grammar enforces
    markers: tuple[str, ...] = ()

    @property
    def enforceable(self) -> bool:
        """Whether its own syntax is the one that a grammar enforces."""
        return bool(self.make is _FROM_MARKUP.get(self.markup))


def _json(markup: Markup) -> MakeParser:
    def make(declared: Declared, seed: str) -> Parser:
        return JsonCalls(markup, names=declared, seed=seed)

    return make


_FROM_MARKUP: Final = {markup: _json(markup) for markup in (HERMES, LLAMA, MISTRAL, GRANITE)}

_THINK = Tags()
_RESPONSE = Tags(answer_opening="<response>", answer_closing="</response>")
_BRACKETS = Tags("[THINK]", "[/THINK]")

REASONING: Final = (
    ReasoningFamily(
        name=HARMONY, models="gpt-oss", syntax="messages in the channel `analysis`", signs=("<|channel|>",)
    ),
    ReasoningFamily(
        name="mistral", models="Magistral", syntax="`[THINK]…[/THINK]`", signs=("[THINK]",), tags=_BRACKETS
    ),
    ReasoningFamily(
        name="ernie45",
        models="ERNIE 4.5 Thinking, Granite 3.3",
        syntax="`<think>…</think><response>…</response>`",
        signs=("</think>", "<response>"),
        tags=_RESPONSE,
    ),
    ReasoningFamily(
        name="glm45",
        models="GLM-4.5, GLM-Z1",
        syntax="`<think>…</think>`",
        signs=("[gMASK]", "<think>"),
        tags=_THINK,
    ),
    ReasoningFamily(
        name="deepseek_r1",
        models="DeepSeek-R1 and its distilled models, V3.1",
        syntax="`<think>…</think>`, opened by most templates",
        signs=("<｜Assistant｜>", "</think>"),
        tags=_THINK,
    ),
    ReasoningFamily(
        name="qwen3",
        models="Qwen3, SmolLM3 and others",
        syntax="`<think>…</think>`",
        signs=("</think>",),
        tags=_THINK,
    ),
)

TOOLS: Final = (
    ToolFamily(
        name=HARMONY,
        models="gpt-oss",
        syntax="messages to `functions.NAME`",
        signs=("<|channel|>",),
        make=lambda declared, seed: harmony.Harmony(thinks=False, calls=bool(declared), seed=seed),
        markers=harmony.MARKERS,
    ),
    ToolFamily(
        name="deepseek_v3",
        models="DeepSeek-V3, R1, V3.1",
        syntax="`<｜tool▁call▁begin｜>`, JSON arguments",
        signs=("<｜tool▁call▁begin｜>",),
        make=lambda _, seed: DeepSeekCalls(seed),
        markers=deepseek_calls.MARKERS,
    ),
    ToolFamily(
        name="glm45",
        models="GLM-4.5, GLM-4.6",
        syntax="`<tool_call>NAME<arg_key>…<arg_value>…`",
        signs=("<arg_key>",),
        make=lambda declared, seed: GlmCalls(declared, seed=seed),
        markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    ToolFamily(
        name="qwen3_coder",
        models="Qwen3-Coder",
        syntax="`<function=NAME><parameter=KEY>…`",
        signs=("<parameter=",),
        make=lambda declared, seed: QwenCoderCalls(declared, seed=seed),
        markers=("<tool_call>", "</tool_call>"),
    ),
    ToolFamily(
        name="granite",
        models="Granite 3, Phi-4-mini",
        syntax='`<|tool_call|>[{"name": …, "arguments": …}]`',
        signs=("<|tool_call|>",),
        make=_FROM_MARKUP[GRANITE],
        markup=GRANITE,
        markers=(GRANITE.marker,),
    ),
    ToolFamily(
        name="hermes",
        models="Hermes, Qwen2.5, Qwen3, ERNIE 4.5, SmolLM3",
        syntax='`<tool_call>{"name": …, "arguments": …}</tool_call>`',
        signs=("<tool_call>",),
        make=_FROM_MARKUP[HERMES],
        markers=(HERMES.marker, HERMES.closing),
    ),
    ToolFamily(
        name="mistral",
        models="Mistral 7B v0.3, Nemo, Small",
        syntax='`[TOOL_CALLS][{"name": …, "arguments": …}]`',
        signs=("[TOOL_CALLS]",),
        make=_FROM_MARKUP[MISTRAL],
        markup=MISTRAL,
        markers=(MISTRAL.marker,),
    ),
    ToolFamily(
        name="pythonic",
        models="Llama 4, Llama 3.2 with Python lists",
        syntax="`[NAME(KEY=VALUE, …), …]`",
        signs=("func_name1(",),
        make=lambda declared, seed: PythonicCalls(names=declared, seed=seed),
        markers=(pythonic_calls.START, pythonic_calls.END),
    ),
    ToolFamily(
        name="llama3_json",
        models="Llama 3.1 to 3.3",
        syntax='`{"name": …, "parameters": …}`',
        signs=('"parameters"', "python_tag"),
        make=_FROM_MARKUP[LLAMA],
        markup=LLAMA,
        markers=(LLAMA.marker,),
    ),
)


def reasoning_family(name: str, template: str | None) -> ReasoningFamily | None:
    """The family with this name; with `auto` the one that wrote the template; None if there is none."""
    if name == "auto":
        matching = (family for family in REASONING if all(sign in (template or "") for sign in family.signs))
        return next(matching, None)
    return next((family for family in REASONING if family.name == name), None)


def tool_family(name: str, template: str | None) -> ToolFamily | None:
    """The family with this name; with `auto` the one that wrote the template, or Hermes; None for `none`."""
    if name == "auto":
        matching = (family for family in TOOLS if any(sign in (template or "") for sign in family.signs))
        return next(matching, HERMES_FAMILY)
    return next((family for family in TOOLS if family.name == name), None)


HERMES_FAMILY: Final = next(family for family in TOOLS if family.name == "hermes")
