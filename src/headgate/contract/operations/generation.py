"""Operations that generate tokens or convert between tokens and text, under OpenAI's paths and our own."""

from __future__ import annotations

from typing import Any, Final

from headgate.contract.answers import ChatCompletion, Detokenized, TextCompletion, Tokenized
from headgate.contract.operations.operation import GENERATED, POSTED, Access, Operation, Relay
from headgate.contract.responses import ResponseObject
from headgate.contract.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)


def _generation(path: str, summary: str, body: Any, answer: Any) -> Operation:
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
    )


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
EMBEDDINGS: Final = Operation(
    method="POST",
    path="/v1/embeddings",
    summary="Compute embeddings of texts, on workers that run other systems",
    body=Any,
    answer=Any,
    errors=GENERATED,
    access=Access.TENANT,
    fan_out=Relay(),
    on_server=False,
    in_api=False,
)
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
