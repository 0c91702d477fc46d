"""Converts a request body to choices: sampling parameters, seeds, limits, and one `ChoiceJob` per choice."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headgate.api.generate.generation import ChoiceJob, Finish, Resumed
from headgate.api.state import Api
from headgate.contract.sampling import SamplingParams, TextParams
from headgate.contract.schema import Generation, ResumedChoice, Sampled
from headgate.errors import RequestError
from headgate.protocol.request import GenerateRequest, Ticket


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    text: str | None = None  # set if the answer begins with the prompt (echo)
    opened: bool = False  # it ends in reasoning


def check_choices(count: int, most: int) -> None:
    if count > most:
        raise RequestError(
            f"{count} choices were requested; a request may have at most {most}. Send several requests",
            param="n",
            code="too_many_choices",
        )


def make_jobs(
    body: Generation,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    text: TextParams,
    *,
    kept: frozenset[int] = frozenset(),
) -> list[ChoiceJob]:
    """The choices of all prompts, in prompt order. `kept`: special tokens that stay in the text."""
    n = text.n
    if body.generated_token_ids and len(prompts) * n > 1:
        raise RequestError("generated_token_ids goes with one choice only", param="generated_token_ids")
    _check_kv(body, len(prompts) * n)
    seeds, tickets = _seeds(sampling.seed), _tickets(body)
    resumed = _resumed(body, sampling, [len(prompt.token_ids) for prompt in prompts for _ in range(n)])
    return [
        ChoiceJob(
            index=index,
            request=_request(
                body, prompt, _sampling(body, sampling, next(seeds), resumed.get(index)), tickets.get(index)
            ),
            stop=text.stop,
            include_stop=text.include_stop_str_in_output,
            skip_special=text.skip_special_tokens,
            kept=kept,
            opened=prompt.opened,
            delivered_chars=body.delivered_chars or 0,
            prompt_text=prompt.text,
            resumed=resumed.get(index),
        )
        for index, prompt in enumerate(prompt for prompt in prompts for _ in range(n))
    ]


def recommended(api: Api, given: dict[str, Any]) -> dict[str, Any]:
    """`given` with the server's parameters where it has none."""
    ours = dict(api.settings.sampling)
    if "max_tokens" in ours:
        ours["max_tokens"] = max(ours["max_tokens"], given.get("min_tokens", 0))
    return ours | given


def sampling_params(given: dict[str, Any], **own: Any) -> SamplingParams:
    """The parameters that the body sets; `own` has those that the APIs express differently."""
    try:
        return SamplingParams(**given | own)
    except ValueError as error:
        raise RequestError(str(error), param=str(error).split()[0], code="invalid_value") from None


def asked_prompt_logprobs(given: dict[str, Any], body: Generation) -> int | None:
    """How many candidates to return for each position of the prompt, or None. As in vLLM, streams do not have them."""
    asked: int | None = given.get("prompt_logprobs")
    if asked and body.stream:
        raise RequestError(
            "prompt_logprobs are not available with stream; leave stream out",
            param="prompt_logprobs",
            code="unsupported_parameter",
        )
    return None if body.stream else asked


def _seeds(seed: int | None) -> Iterator[int]:
    """A seed for each choice: random, or counted up from the given one."""
    while True:
        if seed is None:
            yield secrets.randbits(63)
        else:
            yield seed
            seed = seed + 1 if seed < 2**63 - 1 else -(2**63)


def _sampling(body: Generation, sampling: SamplingParams, seed: int, resumed: Resumed | None) -> SamplingParams:
    # Prompt log-probabilities are sent with the first token, so a resumed choice has sent them already. An export sends
    # a ticket only; the server that generates the answer scores the prompt.
    scored = sampling.prompt_logprobs if resumed is None and not body.export_kv else None
    routed = sampling.return_routed_experts and not body.export_kv
    return msgspec.structs.replace(sampling, seed=seed, prompt_logprobs=scored, return_routed_experts=routed)


def _resumed(body: Generation, sampling: SamplingParams, prompts: Sequence[int]) -> dict[int, Resumed]:
    """What another server has generated, by choice; choices without tokens or an end are left out.

    `prompts` has the prompt length of each choice: the counts that a body claims must agree with it and with the ids.
    """
    if body.resume is None:
        return {}
    begun = any(choice.token_ids or choice.finish for choice in body.resume.choices)
    if begun and not body.stream and (sampling.logprobs is not None or sampling.prompt_logprobs is not None):
        raise RequestError(
            "a whole answer with logprobs cannot be resumed; send the request again without resume",
            param="resume",
        )
    generated = len(body.generated_token_ids or ())
    resumed: dict[int, Resumed] = {}
    for i, claimed in enumerate(body.resume.choices):
        where = f"resume.choices[{i}]"
        if claimed.index >= len(prompts) or claimed.index in resumed:
            raise RequestError(f"there is no choice {claimed.index}, or it is named twice", param=f"{where}.index")
        if claimed.token_ids or claimed.finish or claimed.end:
            resumed[claimed.index] = _resumed_choice(claimed, prompts[claimed.index], generated, where)
    return resumed


def _resumed_choice(choice: ResumedChoice, prompt_tokens: int, generated: int, where: str) -> Resumed:
    versions_given = sum(count for _, count in choice.versions)
    if versions_given != len(choice.token_ids):
        raise RequestError(
            f"{len(choice.token_ids)} token ids have {versions_given} weight versions", param=f"{where}.versions"
        )
    versions = tuple(version for version, count in choice.versions for _ in range(count))
    finish = _finish(choice, prompt_tokens, generated + len(choice.token_ids), where)
    return Resumed(tuple(choice.token_ids), versions, choice.delivered_chars, finish, choice.end)


def _finish(choice: ResumedChoice, prompt_tokens: int, output_tokens: int, where: str) -> Finish | None:
    """How the choice ended on another server, with our own counts.

    Zero prompt tokens claim nothing: a router that ends a choice itself has no counts.
    """
    if choice.finish is None:
        return None
    reason, cause, prompt, cached, output = choice.finish
    if prompt and ((prompt, output) != (prompt_tokens, output_tokens) or cached > prompt):
        raise RequestError(
            f"{prompt} prompt tokens ({cached} of them cached) and {output} output tokens are claimed; "
            f"the prompt has {prompt_tokens}, and {output_tokens} ids were made",
            param=f"{where}.finish",
        )
    return Finish(reason, cause, prompt_tokens, 0, output_tokens)  # no cache was used here


def _check_kv(body: Generation, choices: int) -> None:
    if body.export_kv and body.kv_ticket is not None:
        raise RequestError(
            "export_kv and kv_ticket exclude each other: KV is computed here or fetched from another server",
            param="kv_ticket",
        )
    if (body.export_kv or body.kv_ticket is not None) and choices > 1:
        name = "export_kv" if body.export_kv else "kv_ticket"
        raise RequestError(f"{name} goes with one choice only", param=name)


def _tickets(body: Generation) -> dict[int, Ticket]:
    """The ticket, by choice. It can be used once; further choices find the prompt in the prefix cache or compute it."""
    given, params = body.kv_ticket, body.kv_transfer_params if isinstance(body, Sampled) else None
    if given is None and params is not None and params.do_remote_prefill and not body.export_kv:
        given = params.headgate_ticket  # None if another system's server computed the prompt: it is computed here
    return {} if given is None else {0: given.to_engine()}


def _request(body: Generation, prompt: Prompt, sampling: SamplingParams, ticket: Ticket | None) -> GenerateRequest:
    try:
        return GenerateRequest(
            0,
            prompt.token_ids,
            sampling,
            generated=tuple(body.generated_token_ids or ()),
            priority=body.priority or 0,
            timeout_s=body.deadline_ms / 1000 if body.deadline_ms is not None else None,
            salt=body.cache_salt or "",
            export_kv=bool(body.export_kv),
            ticket=ticket,
        )
    except ValueError as error:
        raise RequestError(str(error), param="prompt", code="invalid_value") from None
