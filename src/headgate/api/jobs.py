"""From a body to the choices it asks for: sampling parameters, seeds, limits, and one `Job` per choice."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headgate.api.generation import Job
from headgate.api.schema import ChatRequest, CompletionRequest, Generation, ResponsesRequest, Sampled
from headgate.errors import RequestError
from headgate.protocol.request import GenerateRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    text: str | None = None  # to be repeated before the answer


def check_choices(count: int, most: int) -> None:
    if count > most:
        raise RequestError(
            f"{count} choices were asked for; at most {most} are made for one request. Send several requests",
            param="n",
            code="too_many_choices",
        )


def make_jobs(body: Generation, prompts: Sequence[Prompt], sampling: SamplingParams, n: int) -> list[Job]:
    """The choices of all prompts, those of the first prompt first."""
    if body.generated_token_ids and len(prompts) * n > 1:
        raise RequestError("generated_token_ids goes with one choice only", param="generated_token_ids")
    stop = getattr(body, "stop", None) or ()
    seeds = _seeds(sampling.seed)
    return [
        Job(
            index=index,
            request=_request(body, prompt, msgspec.structs.replace(sampling, seed=next(seeds))),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special=body.skip_special_tokens is not False,
            delivered_chars=body.delivered_chars or 0,
            prompt_text=prompt.text,
        )
        for index, prompt in enumerate(prompt for prompt in prompts for _ in range(n))
    ]


def sampling_params(body: ChatRequest | CompletionRequest | ResponsesRequest, **own: Any) -> SamplingParams:
    """The fields that mean the same in every body, and `own` for those that do not; None is the default everywhere."""
    values = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k == -1 else body.top_k,  # as vLLM writes "off"
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "min_tokens": body.min_tokens,
        "stop_token_ids": None if body.stop_token_ids is None else tuple(body.stop_token_ids),
        "ignore_eos": body.ignore_eos,
        "seed": body.seed,
        **own,
    }
    if isinstance(body, Sampled):
        values |= {name: getattr(body, name) for name in ("presence_penalty", "frequency_penalty", "logit_bias")}
    try:
        return SamplingParams(**{name: value for name, value in values.items() if value is not None})
    except ValueError as error:
        raise RequestError(str(error), param=str(error).split()[0], code="invalid_value") from None


def _seeds(seed: int | None) -> Iterator[int]:
    """A seed for each choice: drawn, or counted up from the one that was given."""
    while True:
        if seed is None:
            yield secrets.randbits(63)
        else:
            yield seed
            seed = seed + 1 if seed < 2**63 - 1 else -(2**63)


def _request(body: Generation, prompt: Prompt, sampling: SamplingParams) -> GenerateRequest:
    try:
        return GenerateRequest(
            0,
            prompt.token_ids,
            sampling,
            generated=tuple(body.generated_token_ids or ()),
            priority=body.priority or 0,
            timeout_s=body.deadline_ms / 1000 if body.deadline_ms is not None else None,
            salt=body.cache_salt or "",
        )
    except ValueError as error:
        raise RequestError(str(error), param="prompt", code="invalid_value") from None
