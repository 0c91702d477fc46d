"""Request bodies of the TRL-compatible API: what the client of `trl vllm-serve` sends (TRL up to 1.10).

Sampling parameters have vLLM's names. Some are fields of the body; others are in `generation_kwargs`, which override
the fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from headgate.contract.decoding import convert
from headgate.contract.sampling import PARAMETERS, MostLogprobs, Size
from headgate.contract.schema import Message, Object, TokenIds
from headgate.errors import RequestError

# Sampling parameters that are fields of the body. The client sends all of them.
SAMPLED: Final = ("n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens")
DEFAULT_MAX_TOKENS: Final = 16
LOGPROBS_MODE: Final = "processed"  # `trl vllm-serve` starts vLLM with processed log-probabilities

Body = TypeVar("Body", bound=msgspec.Struct)


def takes_sampled(body: type[Body]) -> type[Body]:
    """Add the sampling parameters of `SAMPLED` to a body."""
    return msgspec.defstruct(  # type: ignore[return-value]
        body.__name__,
        [(name, PARAMETERS[name].json | None, None) for name in SAMPLED],
        bases=(body,),
        namespace={"__doc__": body.__doc__},
        module=body.__module__,
        kw_only=True,
        forbid_unknown_fields=True,
    )


@takes_sampled
class TrlSampled(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of all generating calls."""

    logprobs: MostLogprobs | None = 0  # null: none; 0: only that of the token itself
    structured_outputs_regex: str | None = None
    generation_kwargs: Object | None = None

    @property
    def sampling_params(self) -> Object:
        given = {name: value for name in SAMPLED if (value := getattr(self, name)) is not None}
        own = {"max_tokens": DEFAULT_MAX_TOKENS, "logprobs": self.logprobs, "logprobs_mode": LOGPROBS_MODE}
        return own | given | (self.generation_kwargs or {})


class TrlPrompts(TrlSampled, kw_only=True, forbid_unknown_fields=True):
    prompts: Annotated[list[str | TokenIds], Meta(min_length=1)]
    images: list[Any] | None = None  # one entry per prompt

    def check(self) -> None:
        if any(image is not None for image in self.images or ()):
            raise RequestError("images are not supported (models read text only); leave them out", param="images")


class TrlConversations(TrlSampled, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[list[Object]], Meta(min_length=1)]  # one conversation per prompt
    chat_template_kwargs: Object | None = None
    tools: list[Object] | None = None

    def conversations(self) -> list[list[Message]]:
        return [
            [convert(_complete(message), Message, f"messages[{i}][{j}]") for j, message in enumerate(conversation)]
            for i, conversation in enumerate(self.messages)
        ]


def _complete(message: Object) -> Object:
    """The message with what a tool call has in OpenAI's API and lacks in a dataset: an id, and arguments as text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [_complete_call(i, call) for i, call in enumerate(calls)]}


def _complete_call(index: int, call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call  # refused when it is converted
    arguments = function.get("arguments", "")
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {"id": f"call_{index}"} | call | {"function": function | {"arguments": text}}


class TrlSequences(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sequences of token ids, whose tokens after the first `prompt_lengths` are scored."""

    sequences: Annotated[list[TokenIds], Meta(min_length=1)]
    prompt_lengths: list[Size]
    top_logprobs: MostLogprobs
    temperature: Annotated[float, Meta(gt=0)] = 1.0  # as in vLLM, log-probabilities of prompts do not depend on it
    response_format: Literal["json", "binary"] = "json"

    def check(self) -> None:
        if len(self.sequences) != len(self.prompt_lengths):
            message = f"{len(self.prompt_lengths)} lengths for {len(self.sequences)} sequences"
            raise RequestError(message, param="prompt_lengths")
        for i, (ids, length) in enumerate(zip(self.sequences, self.prompt_lengths, strict=True)):
            if length > len(ids):
                message = f"sequence {i} has {len(ids)} tokens, so its prompt cannot have {length}"
                raise RequestError(message, param=f"prompt_lengths[{i}]")
