"""Fields that clients of OpenAI, SGLang and vLLM send and that change nothing here.

A field of the table is accepted with the values listed there, and always as null. Any other value would change the answer
in a way that is not implemented, so it is refused by name. Bodies, checks and the table in docs/api.md are derived.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import msgspec

from headgate.contract.parameter import Api
from headgate.errors import RequestError

Place = Literal["body", "sampling_params"]
OPENAI: Final[tuple[Api, ...]] = ("chat", "completions", "responses")
CHOICES: Final[tuple[Api, ...]] = ("chat", "completions")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompatibleField:
    name: str
    apis: tuple[Api, ...]
    why: str
    accepted: tuple[Any, ...] | None = ()  # besides null; None: any value
    place: Place = "body"

    def allows(self, value: Any) -> bool:
        return value is None or self.accepted is None or value in self.accepted

    @property
    def values(self) -> str:
        """The accepted values in words."""
        return "any" if self.accepted is None else ", ".join(json.dumps(each) for each in (None, *self.accepted))


def _fields(
    names: str, apis: tuple[Api, ...], why: str, accepted: tuple[Any, ...] | None = (), place: Place = "body"
) -> Iterable[CompatibleField]:
    return (CompatibleField(name=name, apis=apis, why=why, accepted=accepted, place=place) for name in names.split())


EVERY: Final[tuple[Api, ...]] = (*OPENAI, "sglang", "vllm")
IN_SAMPLING: Final[tuple[Api, ...]] = ("sglang", "vllm")
ENCODED = "decoding never adds spaces"
REASONING = "`--reasoning-parser` decides"
PLACEMENT = "routers place requests"
LOGGING = "concerns logs and metrics only"
STORED = "nothing is stored"
MEDIA = "models read text only"
WEIGHTS = "there are no adapters"
KV = "KV is transferred with `kv_ticket`"
STOP = "use `stop`"
TOKENS = "no other choice of tokens is implemented"
CUT = "long prompts are refused, never cut"
OUTPUT = "not returned"
RENDER = "applies to vLLM's render calls"
KEEPS_ALL: Final = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

COMPATIBLE: Final[tuple[CompatibleField, ...]] = (
    # Reasoning.
    *_fields("separate_reasoning stream_reasoning", (*CHOICES, "responses"), REASONING, (True, False)),
    *_fields("include_reasoning", OPENAI, REASONING, (True,)),
    *_fields("thinking_token_budget", CHOICES, REASONING, (-1,)),
    *_fields("reasoning_ended reasoning_parser_kwargs", ("vllm",), REASONING, None),
    *_fields("require_reasoning", ("sglang",), REASONING, (False,)),
    # What is returned.
    *_fields("return_hidden_states", (*CHOICES, "sglang"), OUTPUT, (False,)),
    *_fields(
        "return_bytes return_indexer_topk return_entropy return_prompt_token_ids", ("sglang",), OUTPUT, (False,)
    ),
    *_fields("return_prompt_text", CHOICES, OUTPUT, (False,)),
    *_fields("return_cached_tokens_details", CHOICES, "`usage` has the cached tokens", None),
    *_fields("token_ids_logprob", ("sglang",), TOKENS),
    *_fields("logprob_token_ids", CHOICES, TOKENS),
    *_fields("output_mode", ("vllm",), "the answer has token ids", ("tokens",)),
    *_fields("return_token_offsets mm_payload return_mm_kwargs", OPENAI, RENDER, None),
    *_fields("token_offsets", ("vllm",), RENDER, None),
    # How tokens are chosen, and the text around them.
    *_fields("use_beam_search", CHOICES, TOKENS, (False,)),
    *_fields("length_penalty", CHOICES, "of beam search", None),
    *_fields("allowed_token_ids", CHOICES, TOKENS),
    *_fields("bad_words", CHOICES, TOKENS, ([],)),
    *_fields("watermarking", OPENAI, TOKENS, (False,)),
    *_fields("repetition_detection", CHOICES, TOKENS),
    *_fields("custom_logit_processor", (*CHOICES, "sglang"), TOKENS),
    *_fields("vllm_xargs custom_params", OPENAI, "arguments of extensions", ({},)),
    *_fields("spaces_between_special_tokens", CHOICES, ENCODED, None),
    *_fields("truncate_prompt_tokens", CHOICES, CUT),
    *_fields("truncation_side", CHOICES, CUT, None),
    *_fields("stream_interval", (*CHOICES, "sglang"), "tokens are sent as they are generated", None),
    *_fields("stop_regex", CHOICES, STOP),
    # The prompt.
    *_fields("echo", ("chat",), "not implemented for chat", (False,)),
    *_fields("add_special_tokens", ("chat",), "templates write special tokens", (False,)),
    *_fields("documents", ("chat",), "pass them in `chat_template_kwargs`", ([],)),
    *_fields("chat_template", ("chat",), "the template of the model is used"),
    *_fields("functions", ("chat",), "use `tools`", ([],)),
    *_fields("function_call", ("chat",), "use `tool_choice`", ("none", "auto")),
    *_fields("prompt_embeds", ("completions",), MEDIA),
    *_fields("input_embeds", ("sglang",), MEDIA),
    *_fields("image_data video_data audio_data", ("sglang",), MEDIA, ([],)),
    *_fields("modalities", ("sglang",), MEDIA, None),
    *_fields("features content_parts", ("vllm",), MEDIA, ([],)),
    *_fields("media_io_kwargs mm_processor_kwargs", OPENAI, MEDIA, ({},)),
    *_fields("mcp_servers", ("messages",), "clients call tools", ([],)),
    *_fields("container", ("messages",), "clients call tools"),
    *_fields("cache_control", ("messages",), "prefixes are cached in any case", None),
    *_fields("context_management", ("messages",), "prompts are not changed", ({}, {"edits": []}, KEEPS_ALL)),
    *_fields("user_profile_id workspace_id", ("messages",), LOGGING, None),
    *_fields("speed", ("messages",), "there is one speed", ("standard",)),
    # Of OpenAI.
    *_fields("store", CHOICES, STORED, (False,)),
    *_fields("store", ("responses",), STORED, (True, False)),
    *_fields("background", ("responses",), "an answer goes to the connection that asks for it", (False,)),
    *_fields("previous_response_id conversation", ("responses",), f"{STORED}; send the conversation in `input`"),
    *_fields("prompt", ("responses",), f"{STORED}; send the text in `input`"),
    *_fields("truncation", ("responses",), CUT, ("disabled",)),
    *_fields("modalities", ("chat",), "models write text only", (["text"],)),
    *_fields("audio", ("chat",), "models write text only"),
    *_fields("prediction", ("chat",), "changes the speed only", None),
    *_fields("web_search_options", ("chat",), "models do not search"),
    # Adapters, KV, sessions, placement.
    *_fields("lora_path", (*CHOICES, "sglang"), WEIGHTS),
    *_fields("lora_id", ("sglang",), WEIGHTS),
    *_fields("kv_transfer_params", ("responses",), KV),
    *_fields("ec_transfer_params", (*OPENAI, "vllm"), KV),
    *_fields("bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key", (*CHOICES, "sglang"), KV),
    *_fields("session_params", (*CHOICES, "sglang"), "nothing is stored"),
    *_fields("session_id", (*OPENAI, "vllm"), PLACEMENT, None),
    *_fields("data_parallel_rank routed_dp_rank disagg_prefill_dp_rank", (*CHOICES, "sglang"), PLACEMENT, None),
    *_fields("conversation_id extra_key", ("sglang",), PLACEMENT, None),
    *_fields("model", ("sglang",), "a server has one model", None),
    *_fields("background", ("sglang",), "nothing is stored", (False,)),
    *_fields("log_metrics no_logs custom_labels external_trace_header", ("sglang",), LOGGING, None),
    # Within `sampling_params`.
    *_fields("spaces_between_special_tokens", IN_SAMPLING, ENCODED, None, "sampling_params"),
    *_fields("custom_params stream_interval", ("sglang",), "see above", None, "sampling_params"),
    *_fields("stop_regex", ("sglang",), STOP, (), "sampling_params"),
    *_fields("detokenize output_kind", ("vllm",), "the answer has token ids", None, "sampling_params"),
    *_fields("skip_clone output_text_buffer_length", ("vllm",), "internal to vLLM", None, "sampling_params"),
    *_fields("flat_logprobs stream_interval", ("vllm",), "internal to vLLM", None, "sampling_params"),
    *_fields("skip_reading_prefix_cache", ("vllm",), "changes no token", None, "sampling_params"),
    *_fields("extra_args", ("vllm",), "arguments of extensions", ({},), "sampling_params"),
    *_fields("truncate_prompt_tokens", ("vllm",), CUT, (), "sampling_params"),
    *_fields("use_beam_search early_stopping", ("vllm",), TOKENS, (False,), "sampling_params"),
    *_fields("length_penalty", ("vllm",), "of beam search", None, "sampling_params"),
    *_fields("best_of", ("vllm",), TOKENS, (1,), "sampling_params"),
    *_fields("bad_words", ("vllm",), TOKENS, ([],), "sampling_params"),
    *_fields("watermarking", ("vllm",), TOKENS, (False,), "sampling_params"),
    *_fields("thinking_token_budget", ("vllm",), REASONING, (-1,), "sampling_params"),
    *_fields(
        "allowed_token_ids logits_processors repetition_detection logprob_token_ids prompt_logprob_token_ids "
        "prompt_logprob_start trace_decode_token_ids",
        ("vllm",),
        TOKENS,
        (),
        "sampling_params",
    ),
)


def fields_of(api: Api, place: Place = "body") -> Mapping[str, CompatibleField]:
    return {field.name: field for field in COMPATIBLE if api in field.apis and field.place == place}


Body = TypeVar("Body", bound=msgspec.Struct)


def takes_compatible(api: Api) -> Callable[[type[Body]], type[Body]]:
    """Add the compatible fields of `api` to a body; fields that the body has already keep their meaning."""

    def extended(body: type[Body]) -> type[Body]:
        fields = {name: field for name, field in fields_of(api).items() if name not in body.__struct_fields__}
        _CHECKED[api] = tuple(fields.values())
        return msgspec.defstruct(  # type: ignore[return-value]
            body.__name__,
            [(name, Any, None) for name in fields],
            bases=(body,),
            namespace={"__doc__": body.__doc__},
            module=body.__module__,
            kw_only=True,
            forbid_unknown_fields=True,
        )

    return extended


_CHECKED: dict[Api, tuple[CompatibleField, ...]] = {}  # by API: the fields that its body takes for compatibility only


def check_compatible(body: msgspec.Struct, api: Api) -> None:
    """Refuse a value that would change the answer."""
    for field in _CHECKED[api]:
        value = getattr(body, field.name)
        if value is not None and not field.allows(value):
            raise refusal(field, field.name)


def refusal(field: CompatibleField, param: str) -> RequestError:
    only = f" other than {field.values}" if field.accepted else ""
    return RequestError(
        f"{field.name}{only} is not supported ({field.why}); leave it out", param=param, code="unsupported_parameter"
    )


_IN_SAMPLING: Final = {api: fields_of(api, "sampling_params") for api in IN_SAMPLING}


def check_sampling_field(api: Api, name: str, value: Any, within: str = "sampling_params") -> None:
    """A member of `sampling_params` that is no sampling parameter: without effect, or refused."""
    param = f"{within}.{name}"
    if (field := _IN_SAMPLING[api].get(name)) is not None:
        if not field.allows(value):
            raise refusal(field, param)
    elif value is not None:
        raise RequestError(f"{name} is not supported; leave it out", param=param, code="unknown_parameter")
