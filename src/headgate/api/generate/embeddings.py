"""POST /v1/embeddings, /v1/score and /rerank: vectors of texts, and how similar they are."""

from __future__ import annotations

from base64 import b64encode
from functools import partial
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.generate.pooled import pooled
from headgate.api.generate.reading import read_body
from headgate.api.generate.serve import RequestContext
from headgate.api.state import api_of
from headgate.contract.answers import Usage
from headgate.contract.event_json import encode
from headgate.contract.schema import prompts_of
from headgate.contract.vectors import (
    EmbeddingItem,
    EmbeddingList,
    EmbeddingRequest,
    RerankAnswer,
    RerankDocument,
    RerankRequest,
    RerankResult,
    Score,
    ScoreList,
    ScoreRequest,
)
from headgate.engine.vectors import Vector, read_vector
from headgate.errors import RequestError

as_computed = partial(read_vector, normalised=False)


async def embeddings(request: Request) -> Response:
    body, api = await read_body(request, EmbeddingRequest), api_of(request)
    hidden = api.engines.info.hidden
    if body.dimensions is not None and body.dimensions > hidden:
        raise RequestError(f"dimensions must be between 1 and {hidden}", param="dimensions", code="invalid_value")
    read = partial(read_vector, dimensions=body.dimensions, normalised=body.normalize is not False)
    in_base64 = body.encoding_format == "base64"

    def write(data: bytes) -> Any:
        """A vector in JSON. Written one by one, because all vectors of a request would block the event loop."""
        vector = read(data)
        return b64encode(vector.tobytes()).decode() if in_base64 else msgspec.Raw(encode(vector.tolist()))

    def compose(context: RequestContext, vectors: list[Any], usage: Usage) -> EmbeddingList:
        data = [EmbeddingItem(index=i, embedding=vector) for i, vector in enumerate(vectors)]
        id = context.id("embd-")
        return EmbeddingList(id=id, created=context.created, model=api.model_name, data=data, usage=usage)

    return pooled(request, body, "embedding", prompts_of(body.input, "input"), "input", write, compose)


async def score(request: Request) -> Response:
    body, api = await read_body(request, ScoreRequest), api_of(request)
    first, second = body.pairs()

    def compose(context: RequestContext, vectors: list[Vector], usage: Usage) -> ScoreList:
        scores = similarities(vectors[: len(first)], vectors[len(first) :])
        data = [Score(index=i, score=each) for i, each in enumerate(scores)]
        id = context.id("score-")
        return ScoreList(id=id, created=context.created, model=api.model_name, data=data, usage=usage)

    param = "documents" if body.text_2 is None else "text_2"
    return pooled(request, body, "score", [*first, *second], param, as_computed, compose)


async def rerank(request: Request) -> Response:
    body, api = await read_body(request, RerankRequest), api_of(request)
    texts = body.texts()

    def compose(context: RequestContext, vectors: list[Vector], usage: Usage) -> RerankAnswer:
        scores = similarities(vectors[:1], vectors[1:])
        results = [RerankResult(index=i, relevance_score=each) for i, each in enumerate(scores)]
        results.sort(key=lambda result: -result.relevance_score)  # stable: equal documents keep their order
        results = results[: body.top_n]
        if body.return_documents is not False:
            for result in results:
                result.document = RerankDocument(text=texts[result.index])
        return RerankAnswer(id=context.id("rerank-"), model=api.model_name, results=results, usage=usage)

    return pooled(request, body, "rerank", [body.query, *texts], "documents", as_computed, compose)


def similarities(first: list[Vector], second: list[Vector]) -> list[float]:
    """The cosine similarity of each pair of vectors; a single first vector is part of every pair."""
    a, b = (np.stack(vectors).astype(np.float64) for vectors in (first, second))
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    scores: list[float] = ((a * b).sum(1) / np.where(lengths, lengths, 1)).tolist()
    return scores
