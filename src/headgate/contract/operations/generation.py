"""Operations that generate tokens, or convert between tokens and text: the paths of OpenAI and Anthropic, and ours."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

from headgate.contract.answers import ChatCompletion, Detokenized, TextCompletion, Tokenized
from headgate.contract.messages import (
    CountTokensRequest,
    MessageErrorBody,
    MessageObject,
    MessagesRequest,
    TokenCount,
)
from headgate.contract.operations.operation import GENERATED, POSTED, Access, Operation, Relay
from headgate.contract.responses import ResponseObject
from headgate.contract.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from headgate.contract.vectors import (
    EmbeddingList,
    EmbeddingRequest,
    RerankAnswer,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)


def _generation(path: str, summary: str, body: Any, answer: Any, *, restarts: bool = False) -> Operation:
    return Operation(
        method="POST",
        path=path,
        summary=summary,
        body=body,
        answer=answer,
        errors=GENERATED,
        access=Access.TENANT,
        fan_out=Relay(),
        generates=True,
        restarts=restarts,
    )


_pooled = partial(_generation, restarts=True)

CHAT_COMPLETIONS: Final = _generation(
    "/v1/chat/completions", "Generate the next message of a conversation", ChatRequest, ChatCompletion
)
COMPLETIONS: Final = _generation("/v1/completions", "Continue a text", CompletionRequest, TextCompletion)
RESPONSES: Final = _generation(
    "/v1/responses",
    "Generate the next message of a conversation, with OpenAI's Responses API; nothing is stored",
    ResponsesRequest,
    ResponseObject,
)
MESSAGES: Final = replace(
    _generation(
        "/v1/messages",
        "Generate the next message of a conversation, with Anthropic's Messages API",
        MessagesRequest,
        MessageObject,
    ),
    error=MessageErrorBody,
)
COUNT_TOKENS: Final = Operation(
    method="POST",
    path="/v1/messages/count_tokens",
    summary="Count the tokens of the prompt of a Messages API request",
    body=CountTokensRequest,
    answer=TokenCount,
    errors=POSTED,
    error=MessageErrorBody,
    access=Access.TENANT,
    fan_out=Relay(),
)
EMBEDDINGS: Final = _pooled("/v1/embeddings", "Compute the vectors of texts", EmbeddingRequest, EmbeddingList)
SCORE: Final = _pooled("/v1/score", "Compute the similarity of pairs of texts", ScoreRequest, ScoreList)
_RERANK: Final = ("Sort documents by their similarity to a query", RerankRequest, RerankAnswer)
RERANK: Final = _pooled("/rerank", *_RERANK)
RERANK_V1: Final = _pooled("/v1/rerank", *_RERANK)
TOKENIZE: Final = Operation(
    method="POST",
    path="/tokenize",
    summary="Convert a text or a conversation to token ids",
    body=TokenizeRequest,
    answer=Tokenized,
    errors=POSTED,
    access=Access.TENANT,
    fan_out=Relay(),
)
DETOKENIZE: Final = Operation(
    method="POST",
    path="/detokenize",
    summary="Convert token ids to text",
    body=DetokenizeRequest,
    answer=Detokenized,
    errors=POSTED,
    access=Access.TENANT,
    fan_out=Relay(),
)
