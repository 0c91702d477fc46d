"""Answers held to a grammar: always valid, and the same however they were scheduled (lifecycle, sentence 56)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import msgspec
import pytest

from headgate import LLM, SamplingParams
from headgate.errors import RequestError
from headgate.offline import Completion
from headgate.protocol.message import Submit
from headgate.protocol.request import GenerateRequest
from headgate.testing.tiny import tiny_model
from headgate.text.constraints import choice, json_object, json_schema, regex
from tests.schemas import random_schema

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, dtype="float32", max_running=64) as llm:
        yield llm
        llm.engine.scheduler.check()
        assert llm.engine.loop.idle


def answers(llm: LLM, params: list[SamplingParams]) -> list[Completion]:
    asked = [[i % 250, *range(i % 40)] for i in range(1, len(params) + 1)]
    return llm.generate(asked, params, progress=False)


def test_answers_are_valid_against_200_random_schemas(llm):
    schemas = [random_schema(seed) for seed in range(200)]
    params = [
        SamplingParams(max_tokens=1500, seed=seed, grammar=json_schema(schema)) for seed, schema in enumerate(schemas)
    ]
    complete = 0
    for schema, answer in zip(schemas, answers(llm, params), strict=True):
        assert answer.finish_reason in ("stop", "length"), answer.cause
        if answer.finish_reason == "stop":
            complete += 1
            jsonschema.validate(json.loads(answer.text), schema, cls=jsonschema.Draft202012Validator)
    assert complete >= 198
