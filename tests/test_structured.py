"""Structured output: answers are valid, and identical however they were scheduled (lifecycle, guarantee 56)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import msgspec
import pytest

from headgate import LLM, SamplingParams, offline
from headgate.api.generate.structural_tags import structural_tag
from headgate.errors import RequestError
from headgate.offline import Completion
from headgate.testing.tiny import tiny_model
from headgate.text.constraints import choice, grammar, json_object, json_schema, regex
from tests.resume import resume
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
    assert complete == 200


TAGGED = {
    "structures": [{"begin": "<a>", "schema": {"type": "array", "items": {"type": "integer"}}, "end": "</a>"}],
    "triggers": ["<"],
}
CROWDED = {"max_running": 32, "kv_blocks": 9, "block_size": 16, "max_context": 144, "max_batch_tokens": 33}
COUNT = 100


def mixed(i: int) -> SamplingParams:
    """Parameters with and without a grammar, and with everything else that changes logits."""
    grammars = [
        json_schema(PERSON),
        None,
        regex("([a-f]{3}-){4}\\d+x"),
        choice(["yes, indeed", "no"]),
        json_object(),
        grammar('root ::= "[" [a-z]* ("," root)* "]"'),
        structural_tag(TAGGED),
    ]
    kinds = [{}, {"top_k": 20}, {"repetition_penalty": 1.3, "top_p": 0.9}, {"logit_bias": {7: 5.0, 40: -50.0}}]
    return SamplingParams(seed=i, max_tokens=COUNT, grammar=grammars[i % 7], **kinds[i % 4])


def test_tokens_are_the_same_alone_in_a_batch_preempted_and_resumed_from_any_split(llm, folder):
    params = [mixed(i) for i in range(20)]
    asked = [[i, *range(i)] for i in range(20)]
    alone = [llm.generate([prompt], each, progress=False)[0] for prompt, each in zip(asked, params, strict=True)]
    batch = llm.generate(asked, params, progress=False)
    assert [answer.token_ids for answer in batch] == [answer.token_ids for answer in alone]
    with LLM(folder, dtype="float32", run_ahead=3, **CROWDED) as crowded:
        squeezed = crowded.generate(asked, params, progress=False)
        assert crowded.engine.scheduler.counters.preemptions > 0
        for i, answer in enumerate(squeezed):
            assert answer.token_ids == alone[i].token_ids, "preempted and recomputed in chunks"
        for split in range(1, len(alone[0].token_ids)):
            rest = resume(crowded, asked[0], params[0], alone[0].token_ids[:split])
            assert rest == alone[0].token_ids[split:], f"moved to another engine after {split} tokens"


def test_an_answer_ends_where_its_grammar_ends(llm):
    params = [SamplingParams(seed=i, grammar=choice(["yes", "no", "yes and no"])) for i in range(20)]
    said = answers(llm, params)
    assert {answer.text for answer in said} == {"yes", "no", "yes and no"}
    assert all((answer.finish_reason, answer.cause) == ("stop", "eos") for answer in said)


def test_a_bias_cannot_allow_what_the_grammar_forbids(llm):
    wanted = llm.tokenizer.encode("z")[0]
    params = SamplingParams(seed=0, logit_bias={wanted: 1e30}, grammar=regex("[a-c]{20}"))
    (answer,) = llm.generate("Hi", params, progress=False)
    assert re.fullmatch("[a-c]{20}", answer.text)


def test_greedy_answers_follow_the_grammar(llm):
    (answer,) = llm.generate("Hi", SamplingParams(temperature=0, grammar=regex("\\d{5}")), progress=False)
    assert re.fullmatch("\\d{5}", answer.text)


def test_log_probabilities_are_those_of_the_model_and_not_of_the_grammar(llm):
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    free = llm.generate("Hi", params, progress=False)[0]
    held = llm.generate("Hi", msgspec.structs.replace(params, grammar=regex("z")), progress=False)[0]
    assert held.text == "z" and held.logprobs[0].top_ids == free.logprobs[0].top_ids


def test_an_answer_that_becomes_too_complex_is_aborted_and_others_continue(llm):
    # After the brace, any property of any alternative may follow: more than the matcher's limit.
    wide = [{"type": "object", "properties": {f"k{j}": {"type": "integer"} for j in range(50)}}] * 50
    schema = {"type": "array", "prefixItems": [{"type": "boolean"}, {"anyOf": wide}], "minItems": 2, "items": False}
    beside = answers(llm, [mixed(i) for i in range(3)])
    lost, *others = answers(llm, [SamplingParams(seed=0, grammar=json_schema(schema)), mixed(1), mixed(2)])
    assert (lost.finish_reason, lost.cause) == ("abort", "grammar")
    assert re.fullmatch(r"\[\s*(true|false)\s*,\s*", lost.text), "all that was said before is told"
    assert [other.token_ids for other in others] == [other.token_ids for other in beside[1:]]


@pytest.mark.parametrize("grammar", ["no grammar at all", '{"grammars": [{"json_schema": {"type": "wat"}}]}'])
def test_an_engine_survives_an_unchecked_grammar(llm, grammar, monkeypatch):
    monkeypatch.setattr(offline, "checked", lambda grammar: grammar)
    assert resume(llm, [1, 2, 3], SamplingParams(seed=0, grammar=grammar), []) == []
    assert llm.generate("Hi", mixed(0), progress=False)[0].finish_reason == "stop"


def test_resumed_tokens_that_violate_the_grammar_are_refused(llm):
    assert resume(llm, [1, 2, 3], SamplingParams(seed=0, grammar=regex("[a-c]+")), llm.tokenizer.encode("abz")) == []


def test_a_grammar_that_cannot_be_enforced_is_refused_before_anything_runs(llm):
    with pytest.raises(RequestError, match="cannot be enforced"):
        llm.generate("Hi", SamplingParams(grammar="start: <what"))


def test_a_model_without_a_tokenizer_refuses_grammars_and_serves_the_rest(tmp_path):
    with LLM(tiny_model(tmp_path, tokenizer=False)) as llm:
        with pytest.raises(RequestError, match="no tokenizer, so an answer cannot follow a grammar"):
            llm.generate([1, 2, 3], SamplingParams(grammar=json_object()))
        assert llm.generate([1, 2, 3], SamplingParams(max_tokens=2), progress=False)
