"""POST /v1/embeddings, /v1/score and /rerank, on a server and through a router."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest

from headgate import LLM
from headgate.engine.client import Chunk
from headgate.protocol.output import Cause, Ended, FinishReason, Timings
from headgate.protocol.request import GenerateRequest
from headgate.testing.tiny import tiny_model
from tests.api.live import MODEL, LiveServer
from tests.api.scripted import Client, ScriptedEngines, scripted_app
from tests.router.fleets import LiveRouter, live_router
from tests.simulated import run

TEXTS = ["One text", "Another one, which is longer", "One text"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("embedding") / "tiny")


@pytest.fixture(scope="module")
def expected(model: Path) -> np.ndarray:
    """The vectors of `TEXTS` from an engine in this process. The server has the same model."""
    with LLM(model, device="cpu", max_context=512, kv_blocks=64) as llm:
        return llm.embed(TEXTS, progress=False)


@pytest.fixture(scope="module")
def router(server: LiveServer) -> Iterator[LiveRouter]:
    with live_router(server.url) as router:
        yield router


@pytest.fixture(params=["server", "router"])
def url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param).url


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_the_openai_client_gets_the_vectors_of_the_engine(url: str, expected: np.ndarray, encoding_format: Any):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(input=TEXTS, model=MODEL, user="me", encoding_format=encoding_format)
    data = [each.embedding for each in answer.data]
    vectors = data if encoding_format == "float" else [np.frombuffer(base64.b64decode(text), "<f4") for text in data]
    np.testing.assert_allclose(np.array(vectors, np.float32), expected, rtol=0, atol=1e-6)
    assert [each.index for each in answer.data] == [0, 1, 2] and answer.model == MODEL
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, TEXTS))


def test_texts_and_token_ids_have_the_same_vectors(server: LiveServer):
    def embed(input: Any) -> list[list[float]]:
        answer = server.post("/v1/embeddings", {"input": input})
        assert answer.status_code == 200, answer.text
        return [each["embedding"] for each in answer.json()["data"]]

    ids = [server.post("/tokenize", {"prompt": text}).json()["tokens"] for text in TEXTS]
    assert embed(TEXTS) == embed(ids) == [*embed(TEXTS[0]), *embed(ids[1]), *embed(TEXTS[2])]


def test_dimensions_cut_a_vector_and_normalize_false_leaves_its_length(server: LiveServer):
    def embed(**options: Any) -> np.ndarray:
        return np.array(server.post("/v1/embeddings", {"input": "text", **options}).json()["data"][0]["embedding"])

    raw = embed(normalize=False)
    np.testing.assert_allclose(embed(dimensions=5), raw[:5] / np.linalg.norm(raw[:5]), rtol=1e-5)
    np.testing.assert_array_equal(embed(dimensions=5, normalize=False), raw[:5])


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions", "must be between 1 and 64"),
        ("/v1/embeddings", {"input": []}, "input", "input is empty"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input", "text 1 of input is empty"),
        ("/v1/embeddings", {"input": ["a", 1]}, "input[1]", "expected"),
        ("/v1/embeddings", {"input": ["a"] * 1025}, "input", "1025 texts were given"),
        ("/v1/embeddings", {"input": "a" * 513}, "input", "text 0 of input has 513 tokens; this model takes 512"),
        ("/v1/embeddings", {"input": [1] * 513}, "prompt", "513"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, "model", "not served here"),
        ("/v1/embeddings", {"input": "a", "stream": True}, "stream", "unknown field"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "expected `null`"),
        ("/v1/score", {"text_1": "a"}, "text_2", "give either"),
        ("/v1/score", {"text_1": "a", "documents": "b"}, "text_1", "give either"),
        ("/v1/score", {"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "queries", "has 2 texts"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "length"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", ">= 1"),
    ],
)
def test_a_request_that_cannot_be_carried_out_is_refused_by_name(
    server: LiveServer, path: str, body: Any, param: str, message: str
):
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and message in error["message"] and error["param"] == param


# -------------------------------------------------------------------------------------------------- scores and reranking


@pytest.mark.parametrize(
    ("body", "pairs"),
    [
        ({"text_1": TEXTS[0], "text_2": TEXTS[1]}, [(0, 1)]),
        ({"queries": TEXTS[1], "documents": TEXTS}, [(1, 0), (1, 1), (1, 2)]),
        ({"text_1": TEXTS, "text_2": TEXTS[::-1]}, [(0, 2), (1, 1), (2, 0)]),
    ],
)
def test_scores_are_cosine_similarities(url: str, expected: np.ndarray, body: Any, pairs: list[tuple[int, int]]):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        answer: Any = client.post("/v1/score", cast_to=object, body=body)
    assert [(each["index"], each["object"]) for each in answer["data"]] == [(i, "score") for i in range(len(pairs))]
    scores = [each["score"] for each in answer["data"]]
    assert scores == pytest.approx([expected[a] @ expected[b] for a, b in pairs], abs=1e-6)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_documents_are_sorted_by_their_similarity_to_the_query(server: LiveServer, expected: np.ndarray, path: str):
    documents = [TEXTS[1], {"text": TEXTS[0]}, "something else"]
    answer = server.post(path, {"query": TEXTS[0], "documents": documents}).json()
    results = answer["results"]
    assert (results[0]["index"], results[0]["document"]) == (1, {"text": TEXTS[0]})
    assert results[0]["relevance_score"] == pytest.approx(1)
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True) and sorted(result["index"] for result in results) == [0, 1, 2]
    few = server.post(path, {"query": TEXTS[0], "documents": documents, "top_n": 2, "return_documents": False}).json()
    assert few["results"] == [{name: each[name] for name in ("index", "relevance_score")} for each in results[:2]]


# -------------------------------------------------------------------------------------------------------------- the end


def ended(request: GenerateRequest, reason: FinishReason, cause: Cause) -> Ended:
    return Ended(request.id, reason, cause, len(request.prompt), 0, 0, Timings(0, None, None, 1))


@pytest.mark.parametrize(
    ("reason", "cause", "status", "code"),
    [
        ("abort", "api_abort", 409, "aborted"),
        ("abort", "deadline", 409, "deadline"),
        ("abort", "pause", 503, "paused"),
        ("abort", "shutdown", 503, "unavailable"),
        ("pd_reschedule", "preempted", 503, "unavailable"),
    ],
)
def test_a_text_that_ends_without_its_vector_is_an_error(
    model: Path, reason: FinishReason, cause: Cause, status: int, code: str
):
    async def chunks(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if request.prompt[0] == ord("a"):
            yield Chunk(vector=bytes(256), ended=ended(request, "length", "max_tokens"))
        else:
            yield Chunk(ended=ended(request, reason, cause))

    async def main() -> tuple[int, Any]:
        app = scripted_app(model, ScriptedEngines(chunks))
        client = Client(app, "/v1/embeddings", {"input": ["a", "b"]})
        await client.call()
        (past,) = app.state.api.ledger._history.values()
        assert (past.usage.kind, past.usage.finish_reason, past.usage.cause) == ("embedding", reason, cause)
        return client.status, msgspec.json.decode(client.body)["error"]["code"]

    assert run(main()) == (status, code)


def test_a_zero_vector_stays_zero_and_all_texts_are_pooled_as_configured(model: Path):
    asked: list[GenerateRequest] = []

    async def zeros(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        asked.append(request)
        yield Chunk(vector=bytes(8), ended=ended(request, "length", "max_tokens"))

    async def main() -> Any:
        client = Client(
            scripted_app(model, ScriptedEngines(zeros), pooling="mean"),
            "/v1/embeddings",
            {"input": ["a", "b"], "priority": 3, "deadline_ms": 60000, "tags": {"a": "b"}},
        )
        await client.call()
        return msgspec.json.decode(client.body)

    assert [each["embedding"] for each in run(main())["data"]] == [[0, 0], [0, 0]]
    assert {(each.pooling, each.sampling.max_tokens, each.priority) for each in asked} == {("mean", 0, 3)}
    assert all(each.timeout_s is not None for each in asked)


def test_49_an_idempotency_key_belongs_to_one_request(server: LiveServer):
    key = {"headers": {"Idempotency-Key": "vectors"}}
    first = server.post("/v1/embeddings", {"input": "a"}, **key)
    assert server.post("/v1/embeddings", {"input": "a"}, **key).json() == first.json()
    assert server.post("/v1/embeddings", {"input": "b"}, **key).status_code == 422
    assert server.post("/v1/embeddings", {"input": "a", "dimensions": 3}, **key).status_code == 422
