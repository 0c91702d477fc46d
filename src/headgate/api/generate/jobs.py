"""From a body to the choices it asks for: sampling parameters, seeds, limits, and one `ChoiceJob` per choice."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headgate.api.generate.generation import ChoiceJob, Finish, Resumed
from headgate.contract.sampling import SamplingParams, TextParams
from headgate.contract.schema import Generation, ResumedChoice
from headgate.errors import RequestError
from headgate.protocol.request import GenerateRequest


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


def make_jobs(
    body: Generation, prompts: Sequence[Prompt], sampling: SamplingParams, text: TextParams
) -> list[ChoiceJob]:
    """The choices of all prompts, those of the first prompt first."""
    n = text.n
    if body.generated_token_ids and len(prompts) * n > 1:
        raise RequestError("generated_token_ids goes with one choice only", param="generated_token_ids")
    _check_kv(body, len(prompts) * n)
    seeds = _seeds(sampling.seed)
    resumed = _resumed(body, sampling, [len(prompt.token_ids) for prompt in prompts for _ in range(n)])
    return [
        ChoiceJob(
            index=index,
            request=_request(body, prompt, _sampling(sampling, next(seeds), resumed.get(index))),
            stop=text.stop,
            include_stop=text.include_stop_str_in_output,
            skip_special=text.skip_special_tokens,
            delivered_chars=body.delivered_chars or 0,
            prompt_text=prompt.text,
            resumed=resumed.get(index),
        )
        for index, prompt in enumerate(prompt for prompt in prompts for _ in range(n))
    ]


def sampling_params(given: dict[str, Any], **own: Any) -> SamplingParams:
    """The parameters that were given, and `own` for those that each API asks for in its own way."""
    try:
        return SamplingParams(**given | own)
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


def _sampling(sampling: SamplingParams, seed: int, resumed: Resumed | None) -> SamplingParams:
    # The scores of a prompt are told with the first token.
    scored = sampling.prompt_logprobs if resumed is None else None
    return msgspec.structs.replace(sampling, seed=seed, prompt_logprobs=scored)


def _resumed(body: Generation, sampling: SamplingParams, prompts: Sequence[int]) -> dict[int, Resumed]:
    """By choice, what another server has said of it; nothing of one that has said nothing.

    `prompts` are the tokens of each choice's prompt: what is claimed of a choice must agree with them and with its ids.
    """
    if body.resume is None:
        return {}
    if not body.stream and sampling.logprobs is not None:
        raise RequestError(
            "resume does not go with logprobs unless the answer is a stream: a journal has none; start anew",
            param="resume",
        )
    resumed: dict[int, Resumed] = {}
    for i, said in enumerate(body.resume.choices):
        where = f"resume.choices[{i}]"
        if said.index >= len(prompts) or said.index in resumed:
            raise RequestError(f"there is no choice {said.index}, or it is named twice", param=f"{where}.index")
        if said.token_ids or said.finish:
            resumed[said.index] = _said(said, prompts[said.index], len(body.generated_token_ids or ()), where)
    return resumed


def _said(choice: ResumedChoice, prompt_tokens: int, generated: int, where: str) -> Resumed:
    told = sum(count for _, count in choice.versions)
    if told != len(choice.token_ids):
        raise RequestError(
            f"{len(choice.token_ids)} token ids have {told} weight versions", param=f"{where}.versions"
        )
    versions = tuple(version for version, count in choice.versions for _ in range(count))
    finish = _finish(choice, prompt_tokens, generated + len(choice.token_ids), where)
    return Resumed(tuple(choice.token_ids), versions, choice.delivered_chars, finish)


def _finish(choice: ResumedChoice, prompt_tokens: int, output_tokens: int, where: str) -> Finish | None:
    """How it ended elsewhere, with counts of our own. A claim of no prompt tokens is none: a router ends what it must."""
    if choice.finish is None:
        return None
    reason, cause, prompt, cached, output = choice.finish
    if prompt and ((prompt, output) != (prompt_tokens, output_tokens) or cached > prompt):
        raise RequestError(
            f"{prompt} prompt tokens ({cached} of them cached) and {output} output tokens are claimed; "
            f"the prompt has {prompt_tokens}, and {output_tokens} ids were made",
            param=f"{where}.finish",
        )
    return Finish(reason, cause, prompt_tokens, 0, output_tokens)  # nothing was looked up in a cache here


def _check_kv(body: Generation, choices: int) -> None:
    if body.export_kv and body.kv_ticket is not None:
        raise RequestError(
            "export_kv and kv_ticket exclude each other: KV is computed here or fetched from elsewhere",
            param="kv_ticket",
        )
    if (body.export_kv or body.kv_ticket is not None) and choices > 1:
        name = "export_kv" if body.export_kv else "kv_ticket"
        raise RequestError(f"{name} goes with one choice only", param=name)


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
            export_kv=bool(body.export_kv),
            ticket=None if body.kv_ticket is None else body.kv_ticket.to_engine(),
        )
    except ValueError as error:
        raise RequestError(str(error), param="prompt", code="invalid_value") from None
