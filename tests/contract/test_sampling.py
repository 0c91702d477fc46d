"""Every sampling parameter through every API that accepts it, with cases derived from the table.

The table itself is checked at the end against fixed values: names in other APIs, wire order, and messages.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import inspect

from headgate.api.generate import generation, serve
from headgate.api.generate.generation import ChoiceJob, Piece
from headgate.contract import schema
from headgate.contract.messages import MessagesRequest
from headgate.contract.openapi import server_description
from headgate.contract.parameter import APIS, Api, OneOf, Range, SamplingParameter
from headgate.contract.sampling import PARAMETERS, SAMPLING, SamplingParams, sampling_given, set_if_absent
from headgate.device.rows import COLUMNS, Rows
from headgate.engine.client import Chunk
from headgate.protocol.output import Ended, Timings
from headgate.protocol.plan import Join
from headgate.protocol.request import GenerateRequest
from headgate.testing.tiny import tiny_model
from tests.api.scripted import Client, ScriptedEngines, scripted_app

MAX_CHOICES = 4
MOST = 2**31 - 1

BODIES: dict[Api, type[msgspec.Struct]] = {
    "chat": schema.ChatRequest,
    "completions": schema.CompletionRequest,
    "responses": schema.ResponsesRequest,
    "messages": MessagesRequest,
}
CALLS: dict[Api, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    "completions": ("/v1/completions", {"prompt": "a"}),
    "responses": ("/v1/responses", {"input": "a"}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}),
    "sglang": ("/generate", {"text": "a"}),
    "vllm": ("/inference/v1/generate", {"token_ids": [1, 2]}),
}
NAMED = [(api, each.name, name) for api in APIS for each in PARAMETERS.values() for name in each.names_in(api)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("sampling") / "tiny")


@dataclass
class Answer:
    status: int
    error: dict[str, Any]
    jobs: list[ChoiceJob]  # one per choice


async def ended(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
    yield Chunk(ended=Ended(request.id, "stop", "eos", len(request.prompt), 0, 0, Timings(0.0, 0.0, 0.0, 0.0)))


@pytest.fixture
def ask(model, monkeypatch):
    app = scripted_app(model, ScriptedEngines(ended), max_choices=MAX_CHOICES)
    jobs: list[ChoiceJob] = []

    async def collect(api: Any, record: Any, submitted: Sequence[ChoiceJob], run: Any) -> list[Piece]:
        jobs.extend(submitted)
        return await generation.collect(api, record, submitted, run)

    monkeypatch.setattr(serve, "collect", collect)

    def ask(api: Api, fields: dict[str, Any]) -> Answer:
        jobs.clear()
        path, body = CALLS[api]
        client = Client(app, path, body | (fields if api in BODIES else {"sampling_params": fields}))
        asyncio.run(client.call())
        return Answer(client.status, json.loads(client.body)["error"] if client.status != 200 else {}, list(jobs))

    return ask


# ------------------------------------------------------------------------------------------------- what the table says


@dataclass(frozen=True)
class Case:
    value: Any
    code: str = ""  # of the error; empty if it is accepted


def cases(parameter: SamplingParameter) -> Iterator[Case]:
    """Yield values at the bounds and just outside: first bounds of the JSON type, then of the parameter's rules."""
    if parameter.name == "n":  # its upper bound is the server's
        yield from (Case(1), Case(MAX_CHOICES), Case(0, "invalid_type"), Case(MAX_CHOICES + 1, "too_many_choices"))
        return
    inside, outside = edges(inspect.type_info(parameter.json))
    yield from (Case(value, "invalid_type") for value in [*outside, *wrong_types(inspect.type_info(parameter.json))])
    for value in inside:
        yield Case(value, "" if holds(parameter, value) else "invalid_value")
    for rule in parameter.rules:
        if isinstance(rule, Range) and float in (parameter.kind, type(rule.low)):
            yield Case(low := rule.low if not rule.above else math.nextafter(rule.low, math.inf))
            yield from (Case(rule.high), Case(math.nextafter(rule.high, math.inf), "invalid_value"))
            yield Case(rule.low if rule.above else math.nextafter(low, -math.inf), "invalid_value")


def holds(parameter: SamplingParameter, value: Any) -> bool:
    read = parameter.read or (lambda value: value)
    return all(rule.holds(read(as_ours(value))) for rule in parameter.rules)


def as_ours(value: Any) -> Any:
    """Return the value with integer keys, which JSON does not have."""
    return {int(key): each for key, each in value.items()} if isinstance(value, dict) else value


def edges(info: inspect.Type) -> tuple[list[Any], list[Any]]:
    """Return the extreme values of a JSON type, and values just beyond them."""
    match info:
        case inspect.IntType(ge=int(low), le=int(high)):
            return [low, high], [low - 1, high + 1]
        case inspect.FloatType(ge=None):
            return [], []
        case inspect.FloatType(ge=low, le=high) if low is not None and high is not None:
            return [low, high], [math.nextafter(low, -math.inf), math.nextafter(high, math.inf)]
        case inspect.BoolType():
            return [False, True], []
        case inspect.LiteralType(values=values):
            return list(values), ["x", ""]
        case inspect.StrType(min_length=int(low), max_length=int(high)):
            return ["x" * low, "x" * high], ["x" * (low - 1), "x" * (high + 1)]
        case inspect.ListType(item_type=item, max_length=int(most)):
            inside, outside = edges(item)
            return [[], *([each] for each in inside), inside[:1] * most], [
                inside[:1] * (most + 1),
                *([each] for each in outside),
            ]
        case inspect.DictType(key_type=key, value_type=each, max_length=int(most)):
            keys, values = edges(key), edges(each)
            full = {str(id): values[0][0] for id in range(most + 1)}
            first, bad = str(keys[0][0]), [{str(id): values[0][0]} for id in keys[1]]
            inside = [{}, *({str(id): values[0][0]} for id in keys[0]), *({first: value} for value in values[0])]
            return inside, [full, *bad, *({first: value} for value in values[1])]
        case inspect.UnionType(types=kinds):
            pairs = [edges(kind) for kind in kinds]
            return [each for pair in pairs for each in pair[0]], [each for pair in pairs for each in pair[1]]
    raise AssertionError(f"define the edges of {info}")


def wrong_types(info: inspect.Type) -> list[Any]:
    match info:
        case inspect.IntType():
            return ["1", 1.5, True, [1]]
        case inspect.FloatType():
            return ["1", True, [1]]
        case inspect.BoolType():
            return ["true", 1]
        case inspect.ListType() | inspect.UnionType():
            return [7, {"a": 1}]
    return [7, [1]]


def seen(parameter: SamplingParameter, answer: Answer) -> Any:
    """Return the value of a parameter as the engine or the text layer receives it."""
    assert answer.status == 200, answer.error
    job = answer.jobs[0]
    match parameter.name:
        case "n":
            return len(answer.jobs)
        case "stop":
            return job.stop
        case "skip_special_tokens":
            return job.skip_special
        case "include_stop_str_in_output":
            return job.include_stop
    return getattr(job.request.sampling, parameter.name)


def room_for(parameter: SamplingParameter, api: Api) -> dict[str, Any]:
    """Return fields that raise `max_tokens` if `min_tokens` is tested, because its default is small in some APIs."""
    return {PARAMETERS["max_tokens"].names_in(api)[0]: MOST} if parameter.name == "min_tokens" else {}


# ------------------------------------------------------------------------------------------------- through every API


@pytest.mark.parametrize(("api", "parameter", "name"), NAMED)
def test_values_up_to_the_bounds_are_accepted_and_others_refused_by_name(ask, api, parameter, name):
    parameter = PARAMETERS[parameter]
    tried = list(cases(parameter))
    for case in tried:
        answer = ask(api, room_for(parameter, api) | {name: case.value})
        if case.code:
            assert (answer.status, answer.error["code"]) == (400, case.code), case
            assert answer.jobs == [] and refers_to(answer.error["param"], parameter, api, name), answer.error
        else:
            expected = (parameter.read or (lambda value: value))(as_ours(case.value))
            assert seen(parameter, answer) == expected, case
    assert {bool(case.code) for case in tried} == {True, False}


def refers_to(param: str, parameter: SamplingParameter, api: Api, name: str) -> bool:
    if api in BODIES:
        return param.startswith((name, parameter.name))
    return param.removeprefix("sampling_params.").startswith(parameter.names_in("completions")[0])


@pytest.mark.parametrize(("api", "parameter", "name"), NAMED)
def test_null_and_absence_mean_the_default(ask, api, parameter, name):
    parameter = PARAMETERS[parameter]
    default = parameter.defaults.get(api, parameter.default)
    absent, null = ask(api, {}), ask(api, {name: None})
    if parameter.name == "seed":  # drawn at random for each request
        assert seen(parameter, absent) != seen(parameter, null)
        return
    assert seen(parameter, absent) == default
    # In SGLang's API, null means no limit, and absence a limit of 128.
    assert seen(parameter, null) == (None if name == "max_new_tokens" else default)


ALL_NAMES = {name for _, _, name in NAMED}


@pytest.mark.parametrize("api", APIS)
def test_a_name_of_another_api_is_refused(ask, api):
    ours = {name for each, _, name in NAMED if each == api}
    # Chat has a field of its own with that name.
    others = ALL_NAMES - ours - ({"logprobs"} if api == "chat" else set())
    assert others
    for name in others:
        answer = ask(api, {name: 1})
        assert (answer.status, answer.jobs) == (400, []), name
        assert answer.error["param"] == (name if api in BODIES else f"sampling_params.{name}")


# ---------------------------------------------------------------------------------------------------- everywhere else


@pytest.mark.parametrize("api", BODIES)
def test_openapi_describes_the_fields_of_each_body(api):
    described = msgspec.json.decode(server_description("0"))["components"]["schemas"][BODIES[api].__name__][
        "properties"
    ]
    for each in PARAMETERS.values():
        for name in each.names_in(api):
            assert described[name] == msgspec.json.schema(each.json | None) | {"default": None}, name


RANGED = [(name, rule) for name, each in SAMPLING.items() for rule in each.rules if isinstance(rule, Range)]


@pytest.mark.parametrize(("name", "rule"), RANGED)
def test_a_value_that_crosses_to_an_engine_is_within_its_range(name, rule):
    whole = isinstance(rule.low, int) and SAMPLING[name].kind is not float
    below, above = (rule.low - 1, rule.high + 1) if whole else (-math.inf, math.inf)
    if not whole:
        below, above = math.nextafter(rule.low, below), math.nextafter(rule.high, above)
    for value in (below, above, *([rule.low] if rule.above else [])):
        with pytest.raises(ValueError, match=re.escape(f"{name} must be {rule.words}")):
            SamplingParams(**{name: value})
    for value in (rule.high, rule.low + 1e-300 if rule.above else rule.low):
        assert getattr(SamplingParams(**{name: value}), name) == value


def test_a_name_that_crosses_to_an_engine_is_one_of_those_declared():
    with pytest.raises(ValueError, match="logprobs_mode must be one of raw, scaled, processed"):
        SamplingParams(logprobs_mode="cooked")


@pytest.mark.parametrize("name", COLUMNS)
def test_a_value_reaches_its_column_on_the_device(name):
    parameter = SAMPLING[name]
    (rule,) = parameter.rules
    for value in (rule.names[-1] if isinstance(rule, OneOf) else rule.high, parameter.default):
        rows = Rows(max_rows=2, max_context=8, block_size=4, vocab_size=2**31)
        params = SamplingParams(**{"seed": 7, "max_tokens": None, name: value})
        if name == "seed" and value is None:
            params = SamplingParams(temperature=0)
        rows._set_up_row(Join(1, (1, 2), 2, params, (1,)))
        expected = COLUMNS[name].absent if value is None else value
        assert rows.sampling[1][name] == np.dtype(COLUMNS[name].dtype).type(expected)


@pytest.mark.parametrize("parameter", PARAMETERS.values(), ids=lambda parameter: parameter.name)
def test_defaults_are_valid_and_summaries_are_sentences(parameter):
    assert parameter.default is None or holds(parameter, parameter.default)
    assert parameter.summary[0].isupper() and parameter.summary.endswith(".")


@pytest.mark.parametrize(("given", "expected"), [({}, 5), ({"seed": None}, 5), ({"seed": 0}, 0)])
def test_a_value_is_set_only_where_none_was_given(given, expected):
    body = msgspec.convert(CALLS["chat"][1] | given, schema.ChatRequest)
    set_if_absent(body, "seed", 5)
    assert sampling_given(body, "chat") == {"seed": expected}


# ------------------------------------------------------------------------------------------------- pinned, by hand


def test_the_wire_order_of_sampling_parameters_only_grows():
    assert SamplingParams.__struct_fields__[:16] == (
        *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty"),
        *("frequency_penalty", "logit_bias", "min_tokens", "stop_token_ids", "ignore_eos", "logprobs"),
        *("prompt_logprobs", "grammar"),
    )


SHARED = {
    *("n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "logit_bias"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "skip_special_tokens"),
}
OTHERS = {"seed", "min_tokens", "include_stop_str_in_output"}


@pytest.mark.parametrize(
    ("api", "names"),
    [
        ("chat", SHARED | OTHERS | {"max_tokens", "max_completion_tokens", "no_stop_trim", "prompt_logprobs"}),
        ("completions", SHARED | OTHERS | {"max_tokens", "logprobs", "no_stop_trim", "prompt_logprobs"}),
        (
            "responses",
            SHARED - {"n", "logit_bias", "presence_penalty", "frequency_penalty"} | OTHERS | {"max_output_tokens"},
        ),
        (
            "messages",
            SHARED - {"n", "stop", "logit_bias", "presence_penalty", "frequency_penalty"}
            | OTHERS
            | {"max_tokens", "stop_sequences"},
        ),
        ("sglang", SHARED | {"max_new_tokens", "min_new_tokens", "no_stop_trim", "sampling_seed"}),
        ("vllm", SHARED | OTHERS | {"max_tokens", "logprobs", "prompt_logprobs"}),
    ],
)
def test_each_api_accepts_the_names_of_its_clients_and_no_others(api, names):
    known = [PARAMETERS[name] for name in SHARED | OTHERS | {"max_tokens", "logprobs", "prompt_logprobs", "grammar"}]
    assert {name for each in known for name in each.names_in(api)} == names


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("max_tokens", 0, MOST),
        ("min_tokens", 0, MOST),
        ("top_k", -1, MOST),
        ("seed", -(2**63), 2**63 - 1),
        ("n", 1, MOST),
        ("logprobs", 0, 20),
        ("prompt_logprobs", 0, 20),
    ],
)
def test_integers_in_bodies_are_bounded(name, low, high):
    info = inspect.type_info(PARAMETERS[name].json)
    assert isinstance(info, inspect.IntType) and (info.ge, info.le) == (low, high)


def test_the_newer_name_of_a_limit_takes_precedence(ask):
    answer = ask("chat", {"max_tokens": 3, "max_completion_tokens": 5})
    assert seen(PARAMETERS["max_tokens"], answer) == 5


def test_minus_one_turns_top_k_off(ask):
    for api in APIS:
        assert seen(PARAMETERS["top_k"], ask(api, {"top_k": -1})) == 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", -1, "max_tokens must be at least 0"),
        ("max_tokens", 2**31, "max_tokens must be at least 0, in 31 bits"),
        ("min_tokens", 2**31, "min_tokens must be between 0 and max_tokens"),
        ("stop_token_ids", (2**32,), "stop_token_ids must be token ids"),
        ("temperature", -0.1, "temperature must be between 0 and 100"),
        ("temperature", math.nan, "temperature must be between 0 and 100"),
        ("top_p", 0.0, "top_p must be above 0 and at most 1"),
        ("top_k", -1, r"top_k must be 0 \(off\) or a positive number"),
        ("min_p", 1.5, "min_p must be between 0 and 1"),
        ("seed", 2**63, "seed must be a 64-bit integer"),
        ("repetition_penalty", 0.0, "repetition_penalty must be between 0.01 and 100"),
        ("presence_penalty", 3.0, "presence_penalty must be between -2 and 2"),
        ("frequency_penalty", -3.0, "frequency_penalty must be between -2 and 2"),
        ("logit_bias", {1: math.inf}, "logit_bias must be between -1e30 and 1e30"),
        ("logit_bias", {-1: 1.0}, "logit_bias must be keyed on token ids"),
        ("min_tokens", -1, "min_tokens must be between 0 and max_tokens"),
        ("stop_token_ids", (-1,), "stop_token_ids must be token ids"),
        ("logprobs", 21, "logprobs must be between 0 and 20"),
        ("prompt_logprobs", -1, "prompt_logprobs must be between 0 and 20"),
        ("grammar", "", "grammar must be between 1 and 262144 characters long"),
        ("grammar", "x" * (2**18 + 1), "grammar must be between 1 and 262144 characters long"),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(field, value, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{field: value})


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(ValueError, match="min_tokens"):
        SamplingParams(max_tokens=2, min_tokens=3)


@pytest.mark.parametrize("field", [{"min_tokens": 1}, {"ignore_eos": True}])
def test_min_tokens_and_ignore_eos_are_refused_with_a_grammar(field):
    with pytest.raises(ValueError, match="with a grammar"):
        SamplingParams(grammar="start: /a/", **field)


@pytest.mark.parametrize("field", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_any_penalty_marks_the_parameters_as_penalised(field):
    assert not SamplingParams().penalised
    assert SamplingParams(**{field: 1.5}).penalised
