"""Bodies and answers of requests for vectors: embeddings (OpenAI), scores (vLLM) and reranking (Jina, Cohere).

They generate nothing, so they have no sampling parameters and no streams.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from headgate.contract.answers import Usage
from headgate.contract.sampling import Count
from headgate.contract.schema import CompletionRequest, Name, Priority, Tags
from headgate.errors import RequestError

Texts = Annotated[list[str], Meta(min_length=1)]


class VectorRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that all of these requests share."""

    model: str | None = None
    request_id: Name | None = None
    tags: Tags | None = None
    deadline_ms: Annotated[float, Meta(gt=0, le=1e12)] | None = None
    priority: Priority | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: None = None  # long prompts are refused, never cut
    user: Any = None  # ignored

    def generation(self) -> CompletionRequest:
        """A request with the same options that generates nothing."""
        return CompletionRequest(
            prompt="",
            metadata=self,  # so that a retry with an Idempotency-Key must be the same request
            model=self.model,
            request_id=self.request_id,
            tags=self.tags,
            deadline_ms=self.deadline_ms,
            priority=self.priority,
            cache_salt=self.cache_salt,
        )


class EmbeddingRequest(VectorRequest, kw_only=True, forbid_unknown_fields=True):
    input: str | list[Any]  # text, texts, token ids, or lists of them; see `prompts_of`
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    normalize: bool | None = None  # as in vLLM; true unless given


class EmbeddingItem(msgspec.Struct, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str  # a text is base64 of little-endian float32


class EmbeddingList(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: Usage


# -------------------------------------------------------------------------------------------------------------- scores


class ScoreRequest(VectorRequest, kw_only=True, forbid_unknown_fields=True):
    """Give `text_1` and `text_2`, or the same as `queries` and `documents`."""

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None

    def pairs(self) -> tuple[list[str], list[str]]:
        """The texts of both sides: as many on each, or one and any number."""
        names = ("text_1", "text_2") if self.queries is None and self.documents is None else ("queries", "documents")
        for name in ("text_1", "text_2", "queries", "documents"):
            if (getattr(self, name) is None) is (name in names):
                raise RequestError("give either text_1 and text_2, or queries and documents", param=name)
        first, second = (_listed(getattr(self, name)) for name in names)
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"{names[0]} has {len(first)} texts and {names[1]} has {len(second)}; give one, or as many as there",
                param=names[0],
            )
        return first, second


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: str = "score"
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: Usage


# ----------------------------------------------------------------------------------------------------------- reranking


class RerankDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    text: str


class RerankRequest(VectorRequest, kw_only=True, forbid_unknown_fields=True):
    query: str
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1)]
    top_n: Count | None = None  # by default, all documents
    return_documents: bool | None = None  # true unless given, as in vLLM and Jina's API

    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class RerankResult(msgspec.Struct, kw_only=True):
    index: int  # of the document in the request
    document: RerankDocument | UnsetType = UNSET
    relevance_score: float


class RerankAnswer(msgspec.Struct, kw_only=True):
    id: str
    model: str
    results: list[RerankResult]  # the most relevant document first
    usage: Usage


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
