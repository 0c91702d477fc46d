"""The API of `trl vllm-serve`, for trainers with TRL up to 1.10. Later versions call vLLM's API.

A batch of prompts is one request: its choices are admitted, aborted and accounted for together, and answered whole.
Log-probabilities are `processed`, as `trl vllm-serve` configures vLLM. The log-probability of a token that cannot be
drawn is null.
"""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import inf, isinf
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.compat.vllm import completion_of
from headgate.api.control.lifecycle import controls_of, followed
from headgate.api.generate.answer_format import AnswerFormat, WholeFormat
from headgate.api.generate.constraints import answer_grammar
from headgate.api.generate.generation import ChoiceJob, Piece
from headgate.api.generate.jobs import Prompt, check_choices, make_jobs, sampling_params
from headgate.api.generate.prompts import chat_prompt, text_prompts
from headgate.api.generate.reading import read_body
from headgate.api.generate.serve import RequestContext, exchange
from headgate.api.state import Api, api_of
from headgate.contract.event_json import encode
from headgate.contract.sampling import TextParams, sampling_given, text_params
from headgate.contract.schema import CompletionRequest, Message
from headgate.contract.trl import TrlConversations, TrlPrompts, TrlSampled, TrlSequences
from headgate.edge.responses import json_response
from headgate.protocol.plan import Logprobs

Scores = list[list[float | None]]
Ids = list[list[int]]
ReadPrompts = Callable[[Api, str], Awaitable[list[Prompt]]]

# --------------------------------------------------------------------------------------------- /generate/ and /chat/


class TrlAnswers(msgspec.Struct, kw_only=True):
    """Prompts have one entry each. Other lists have one entry per answer, in prompt order."""

    prompt_ids: list[Sequence[int]]
    completion_ids: list[list[int]]
    logprobs: list[Scores] | None
    logprob_token_ids: list[Ids] | None
    finish_reasons: list[str]  # our extension: an answer may have been aborted


async def generate(request: Request) -> Response:
    asked = await read_body(request, TrlPrompts)
    asked.check()

    async def read(api: Api, share: str) -> list[Prompt]:
        return await text_prompts(api, asked.prompts, share)

    return _answered(request, asked, "generate", len(asked.prompts), read)


async def chat(request: Request) -> Response:
    asked = await read_body(request, TrlConversations)
    conversations = asked.conversations()
    return _answered(request, asked, "chat", len(conversations), partial(_read_chat, asked, conversations))


async def _read_chat(
    asked: TrlConversations, conversations: Sequence[list[Message]], api: Api, share: str
) -> list[Prompt]:
    variables = asked.chat_template_kwargs
    return [
        await chat_prompt(api, messages, share, tools=asked.tools, variables=variables) for messages in conversations
    ]


def _answered(request: Request, asked: TrlSampled, kind: str, prompts: int, read: ReadPrompts) -> Response:
    api, body = api_of(request), completion_of(asked.sampling_params, {"prompt": ""}, "generation_kwargs")
    text = text_params(body, "completions")
    check_choices(prompts * text.n, api.settings.max_choices)
    return exchange(request, body, kind, prompts * text.n, partial(_prepare, api, asked, body, text, read))


async def _prepare(
    api: Api,
    asked: TrlSampled,
    body: CompletionRequest,
    text: TextParams,
    read: ReadPrompts,
    context: RequestContext,
) -> tuple[list[ChoiceJob], AnswerFormat]:
    grammar = await answer_grammar(api, body, context.share, structured_outputs_regex=asked.structured_outputs_regex)
    sampling = sampling_params(sampling_given(body, "completions"), grammar=grammar)
    jobs = make_jobs(body, await read(api, context.share), sampling, text)
    return jobs, WholeFormat(lambda jobs, answers: encode(_generated(jobs, answers, n=text.n)))


def _generated(jobs: Sequence[ChoiceJob], answers: Sequence[Piece], *, n: int) -> TrlAnswers:
    scored = jobs[0].request.sampling.logprobs is not None
    rows = [list(zip(*map(_ranked, answer.tokens, answer.logprobs), strict=True)) for answer in answers if scored]
    return TrlAnswers(
        prompt_ids=[job.request.prompt for job in jobs[::n]],
        completion_ids=[answer.tokens for answer in answers],
        logprobs=[list(row[1]) if row else [] for row in rows] if scored else None,
        logprob_token_ids=[list(row[0]) if row else [] for row in rows] if scored else None,
        finish_reasons=[answer.finish.reason if answer.finish else "" for answer in answers],
    )


def _ranked(token: int, score: Logprobs) -> tuple[list[int], list[float | None]]:
    """The most likely tokens and their values in descending order; the token itself, if not among them, comes last."""
    ids, values = list(score.top_ids), list(score.top)
    if token not in ids:
        ids.append(token)
        values.append(score.token)
    return ids, [None if isinf(value) else value for value in values]


# -------------------------------------------------------------------------------------------- /get_sequence_logprobs/


class SequenceLogprobs(msgspec.Struct, kw_only=True):
    logprobs: list[Scores]
    logprob_token_ids: list[Ids]


class BinarySequenceLogprobs(msgspec.Struct, kw_only=True):
    """Arrays of float32 and int32 in base64, padded to the longest sequence."""

    logprobs_b64: str
    token_ids_b64: str
    actual_logprobs_b64: str
    actual_token_ids_b64: str
    shape: tuple[int, int, int]  # sequences, positions, most likely tokens
    completion_lengths: list[int]


async def get_sequence_logprobs(request: Request) -> Response:
    asked, api = await read_body(request, TrlSequences), api_of(request)
    asked.check()
    check_choices(len(asked.sequences), api.settings.max_choices)
    body = CompletionRequest(prompt="")
    return exchange(request, body, "score", len(asked.sequences), partial(_prepare_scores, api, asked, body))


async def _prepare_scores(
    api: Api, asked: TrlSequences, body: CompletionRequest, context: RequestContext
) -> tuple[list[ChoiceJob], AnswerFormat]:
    prompts = await text_prompts(api, asked.sequences, context.share)
    sampling = sampling_params({"max_tokens": 1, "temperature": 0.0}, prompt_logprobs=asked.top_logprobs)
    compose = _in_arrays if asked.response_format == "binary" else _in_lists
    return make_jobs(body, prompts, sampling, TextParams()), WholeFormat(
        lambda jobs, answers: encode(compose(asked, jobs, answers))
    )


def _scores_after(length: int, answer: Piece) -> list[Logprobs | None]:
    """The scores of all tokens after the first `length`. The first token of a sequence has none."""
    return [None, *answer.prompt_logprobs][length:]


def _in_lists(asked: TrlSequences, jobs: Sequence[ChoiceJob], answers: Sequence[Piece]) -> SequenceLogprobs:
    ids, values = [], []
    for sequence, length, answer in zip(asked.sequences, asked.prompt_lengths, answers, strict=True):
        scores = zip(sequence[length:], _scores_after(length, answer), strict=True)
        rows = [([], []) if score is None else _ranked(token, score) for token, score in scores]
        ids.append([row[0] for row in rows])
        values.append([row[1] for row in rows])
    return SequenceLogprobs(logprobs=values, logprob_token_ids=ids)


def _in_arrays(asked: TrlSequences, jobs: Sequence[ChoiceJob], answers: Sequence[Piece]) -> BinarySequenceLogprobs:
    lengths = [len(ids) - length for ids, length in zip(asked.sequences, asked.prompt_lengths, strict=True)]
    columns, longest = ScoreColumns(asked.top_logprobs), max(lengths)
    for sequence, length, answer in zip(asked.sequences, asked.prompt_lengths, answers, strict=True):
        for token, score in zip(sequence[length:], _scores_after(length, answer), strict=True):
            columns.add(token, score)
        columns.pad(longest - (len(sequence) - length))
    return columns.encoded((len(lengths), longest, asked.top_logprobs), lengths)


class ScoreColumns:
    """Scores of consecutive positions as arrays. A missing value is minus infinity, with the token id 0."""

    def __init__(self, most: int) -> None:
        self._most = most  # likely tokens per position
        self._top, self._top_ids, self._actual, self._actual_ids = array("f"), array("i"), array("f"), array("i")

    def add(self, token: int, score: Logprobs | None) -> None:
        if score is None:
            self.pad(1)
            return
        missing = self._most - len(score.top)  # a vocabulary may be smaller
        self._top.extend((*score.top, *(-inf,) * missing))
        self._top_ids.extend((*score.top_ids, *(0,) * missing))
        self._actual.append(score.token)
        self._actual_ids.append(token)

    def pad(self, positions: int) -> None:
        self._top.extend((-inf,) * (positions * self._most))
        self._top_ids.extend((0,) * (positions * self._most))
        self._actual.extend((-inf,) * positions)
        self._actual_ids.extend((0,) * positions)

    def encoded(self, shape: tuple[int, int, int], lengths: list[int]) -> BinarySequenceLogprobs:
        return BinarySequenceLogprobs(
            logprobs_b64=_base64(self._top),
            token_ids_b64=_base64(self._top_ids),
            actual_logprobs_b64=_base64(self._actual),
            actual_token_ids_b64=_base64(self._actual_ids),
            shape=shape,
            completion_lengths=lengths,
        )


def _base64(values: array[Any]) -> str:
    return b64encode(values.tobytes()).decode()


# ------------------------------------------------------------------------------------------------------------ control


async def reset_prefix_cache(request: Request) -> Response:
    followed(await controls_of(request).flush())
    return json_response({"message": "The prefix cache was reset"})
