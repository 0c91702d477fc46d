"""The sampling parameters. Each is declared once, and everything else about it is derived from the declaration.

A field of `SamplingParams` is sent to the engine; a field of `TextParams` stays in the API process, which converts tokens
to text. The struct field gives name, type and default; its `SamplingParameter` gives range, names in other APIs and the
column in the device's rows. Request bodies, their OpenAPI schema, validation, the translation of SGLang's and vLLM's
`sampling_params`, the columns of the device's rows and the reference page are derived.

How to add a parameter: CONTRIBUTING.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta
from msgspec.structs import astuple

from headgate.contract.parameter import (
    Api,
    Characters,
    Column,
    OneOf,
    Range,
    SamplingParameter,
    TokenIds,
    Values,
    body_fields,
    check,
    checks_of,
    given,
    readers_of,
    require,
    table_of,
    translation,
)

MAX_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 2**18
WITH_CHOICES: tuple[Api, ...] = ("chat", "completions", "sglang", "vllm")  # APIs with a choice of `n` and penalties

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Size = Annotated[int, Meta(ge=0, le=2**31 - 1)]
MostLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]

FLOAT, INT = Column("float32"), Column("int32")

LogprobsMode = Literal["raw", "scaled", "processed"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How the next token is chosen and when to stop. The defaults sample from the model as it is.

    A value is valid once constructed. Fields are positional between processes: append new ones at the end.
    """

    max_tokens: Annotated[
        int | None,
        SamplingParameter(
            summary="The maximum number of tokens in an answer; by default, up to the context length. With 0 the prompt "
            "is computed, and scored if requested, and nothing is generated.",
            json=Size,
            rules=(Range(0, 2**31 - 1, "at least 0, in 31 bits"),),
            names={
                "chat": ("max_completion_tokens", "max_tokens"),
                "responses": ("max_output_tokens",),
                "sglang": ("max_new_tokens",),
            },
            defaults={"completions": 16, "sglang": 128},
        ),
    ] = None
    temperature: Annotated[
        float,
        SamplingParameter(
            summary="Divides the logits; 0 selects the most likely token.",
            rules=(Range(0, 100),),
            column=FLOAT,
        ),
    ] = 1.0
    top_p: Annotated[
        float,
        SamplingParameter(
            summary="Keeps the most likely tokens whose probabilities add up to at least this value.",
            rules=(Range(0, 1, "above 0 and at most 1", above=True),),
            column=FLOAT,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        SamplingParameter(
            summary="Keeps this many of the most likely tokens; 0 and -1 keep all.",
            json=Annotated[int, Meta(ge=-1, le=2**31 - 1)],
            read=lambda value: 0 if value == -1 else value,  # vLLM and SGLang write -1 for "off"
            rules=(Range(0, 2**31 - 1, "0 (off) or a positive number"),),
            column=INT,
        ),
    ] = 0
    min_p: Annotated[
        float,
        SamplingParameter(
            summary="Keeps tokens whose probability is at least this fraction of the most likely token's.",
            rules=(Range(0, 1),),
            column=FLOAT,
        ),
    ] = 0.0
    seed: Annotated[
        int | None,
        SamplingParameter(
            summary="Makes sampling reproducible; by default, each request gets a random seed.",
            json=Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)],
            rules=(Range(-(2**63), 2**63 - 1, "a 64-bit integer"),),
            names={"sglang": ("sampling_seed",)},
            column=Column("uint64"),
        ),
    ] = None
    repetition_penalty: Annotated[
        float,
        SamplingParameter(
            summary="Divides positive logits of tokens in the prompt or the answer, and multiplies negative ones.",
            rules=(Range(0.01, 100),),  # smaller values could make logits infinite
            column=FLOAT,
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        SamplingParameter(
            summary="Subtracted from the logits of tokens that occur in the answer.",
            rules=(Range(-2, 2),),
            apis=WITH_CHOICES,
            column=FLOAT,
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        SamplingParameter(
            summary="Subtracted from the logits of tokens, once for each time that they occur in the answer.",
            rules=(Range(-2, 2),),
            apis=WITH_CHOICES,
            column=FLOAT,
        ),
    ] = 0.0
    logit_bias: Annotated[
        dict[int, float],
        SamplingParameter(
            summary="Maps token ids to values that are added to their logits.",
            json=Annotated[dict[TokenId, Bias], Meta(max_length=1024)],
            # Larger values could make logits infinite.
            rules=(Values(Range(-1e30, 1e30, "between -1e30 and 1e30")), TokenIds("keyed on token ids")),
            apis=WITH_CHOICES,
        ),
    ] = {}
    min_tokens: Annotated[
        int,
        SamplingParameter(
            summary="The minimum number of tokens before a token that ends the answer may be chosen.",
            json=Size,
            rules=(Range(0, 2**31 - 1, "between 0 and max_tokens"),),
            names={"sglang": ("min_new_tokens",)},
            column=INT,
        ),
    ] = 0
    stop_token_ids: Annotated[
        tuple[int, ...],
        SamplingParameter(
            summary="Token ids that end the answer, in addition to the model's own.",
            json=Annotated[list[TokenId], Meta(max_length=256)],
            read=tuple,
            rules=(TokenIds("token ids"),),
        ),
    ] = ()
    ignore_eos: Annotated[
        bool,
        SamplingParameter(summary="Whether to continue after the model's end-of-sequence tokens."),
    ] = False
    logprobs: Annotated[
        int | None,
        SamplingParameter(
            summary="Returns log-probabilities of each token and of this many of the most likely ones. Chat has "
            "`logprobs` (true) and `top_logprobs`, responses `top_logprobs`, SGLang `return_logprob` and "
            "`top_logprobs_num` in the body.",
            json=MostLogprobs,
            rules=(Range(0, MAX_LOGPROBS),),
            apis=("completions", "vllm"),
            column=Column("int32", absent=-1),
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        SamplingParameter(
            summary="The same for the tokens of the prompt. Completions also have `echo` with `logprobs`, SGLang "
            "`logprob_start_len` in the body.",
            json=MostLogprobs,
            rules=(Range(0, MAX_LOGPROBS),),
            apis=("chat", "completions", "vllm"),
            column=Column("int32", absent=-1),
        ),
    ] = None
    grammar: Annotated[
        str | None,
        SamplingParameter(
            summary="A grammar, as `protocol.grammar` defines it, that the answer must match. Derived from "
            "`response_format`, tools, `text.format` (responses) and the constraints of vLLM and SGLang.",
            rules=(Characters(MAX_GRAMMAR_CHARS),),
            apis=(),
        ),
    ] = None
    logprobs_mode: Annotated[
        LogprobsMode,
        SamplingParameter(
            summary="What log-probabilities of generated tokens are of. `raw`: the model's logits. `scaled`: after "
            "bias, penalties, grammar and temperature. `processed`: also after `top_k`, `top_p` and `min_p`, so of the "
            "distribution that the token was drawn from. Log-probabilities of prompts are always `raw`.",
            rules=(OneOf(get_args(LogprobsMode)),),
            defaults={"sglang": "scaled"},
            column=Column("U9"),
        ),
    ] = "raw"
    prompt_logprobs_start: Annotated[
        int,
        SamplingParameter(
            summary="The position of the first prompt token that `prompt_logprobs` covers; KV of the tokens before it may "
            "come from the prefix cache. SGLang has `logprob_start_len` in the body.",
            rules=(Range(0, 2**31 - 1, "at least 0, in 31 bits"),),
            apis=(),
            column=INT,
        ),
    ] = 0

    return_routed_experts: Annotated[
        bool,
        SamplingParameter(
            summary="Whether to return the experts that the model's routers chose for each token, for routing replay. "
            "The server must be started with `--routed-experts`. vLLM and SGLang "
            "have it in the body.",
            apis=("chat", "completions"),
        ),
    ] = False
    routed_experts_prompt_start: Annotated[
        int,
        SamplingParameter(
            summary="The position of the first token whose experts are returned; a multi-turn client has those of the "
            "tokens before it. SGLang has `routed_experts_start_len` in the body.",
            json=Size,
            rules=(Range(0, 2**31 - 1, "at least 0, in 31 bits"),),
            apis=("chat", "completions", "vllm"),
        ),
    ] = 0

    def __post_init__(self) -> None:
        check(astuple(self), _CHECKS)
        if self.min_tokens:
            at_most = self.max_tokens is None or self.min_tokens <= self.max_tokens
            require("min_tokens", at_most, "between 0 and max_tokens")
        if self.grammar is not None:
            # A grammar ends with an EOS token, after which no token is allowed.
            require("min_tokens", self.min_tokens == 0, "0 with a grammar, which alone says when an answer may end")
            require("ignore_eos", not self.ignore_eos, "false with a grammar, whose end is an EOS")

    @property
    def penalised(self) -> bool:
        """Whether sampling depends on the tokens that precede."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class TextParams(msgspec.Struct, frozen=True, kw_only=True):
    """How many answers to generate, and how their tokens become text. These fields are not sent to the engine."""

    n: Annotated[
        int,
        SamplingParameter(
            summary="The number of answers to generate for each prompt.", json=Count, apis=WITH_CHOICES
        ),
    ] = 1
    stop: Annotated[
        tuple[str, ...],
        SamplingParameter(
            summary="A text, or a list of texts, that ends the answer where it occurs.",
            json=StopString | Annotated[list[StopString], Meta(max_length=32)],
            read=lambda value: (value,) if isinstance(value, str) else tuple(value),
            names={"messages": ("stop_sequences",)},
        ),
    ] = ()
    skip_special_tokens: Annotated[
        bool,
        SamplingParameter(summary="Whether to omit special tokens from the text."),
    ] = True
    include_stop_str_in_output: Annotated[
        bool,
        SamplingParameter(
            summary="Whether the text includes the stop string, or stop token, that ended it.",
            # Routers written for SGLang send `no_stop_trim` with every request.
            names={
                "sglang": ("no_stop_trim",),
                "chat": ("include_stop_str_in_output", "no_stop_trim"),
                "completions": ("include_stop_str_in_output", "no_stop_trim"),
            },
        ),
    ] = False


SAMPLING = table_of(SamplingParams)
TEXT = table_of(TextParams)
PARAMETERS = {**SAMPLING, **TEXT}

_CHECKS = checks_of(SAMPLING)

# ---------------------------------------------------------------------------------------------------------------- bodies

Body = TypeVar("Body", bound=msgspec.Struct)


def accepts(*apis: Api) -> Callable[[type[Body]], type[Body]]:
    """Add to a request body the fields that all of `apis` accept and that its base does not have already.

    The fields are read with `sampling_given` and `text_params`.
    """

    def extended(body: type[Body]) -> type[Body]:
        return msgspec.defstruct(  # type: ignore[return-value]
            body.__name__,
            [each for each in body_fields(PARAMETERS, apis) if each[0] not in body.__struct_fields__],
            bases=(body,),
            namespace={"__doc__": body.__doc__},
            module=body.__module__,
            kw_only=True,
            forbid_unknown_fields=True,
        )

    return extended


# SGLang's and vLLM's requests are converted to completions, and those of the responses and messages APIs to chat
# requests.
Native = Literal["chat", "completions"]
SGLANG_TO_COMPLETIONS = translation(PARAMETERS, "sglang", "completions")
VLLM_TO_COMPLETIONS = translation(PARAMETERS, "vllm", "completions")
RESPONSES_TO_CHAT = translation(PARAMETERS, "responses", "chat")
MESSAGES_TO_CHAT = translation(PARAMETERS, "messages", "chat")

_SAMPLING_READERS = {api: readers_of(SAMPLING, api) for api in get_args(Native)}
_TEXT_READERS = {api: readers_of(TEXT, api) for api in get_args(Native)}


def sampling_given(body: msgspec.Struct, api: Native) -> dict[str, Any]:
    """The arguments of `SamplingParams` that `body` sets."""
    return given(body, _SAMPLING_READERS[api])


def text_params(body: msgspec.Struct, api: Native) -> TextParams:
    return TextParams(**given(body, _TEXT_READERS[api]))


def set_if_absent(body: msgspec.Struct, parameter: str, value: Any) -> None:
    if getattr(body, parameter) is None:
        setattr(body, parameter, value)
