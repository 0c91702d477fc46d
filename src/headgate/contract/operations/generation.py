"""Operations that generate or translate tokens, under OpenAI's names and our own."""

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
    "/v1/chat/completions", "The next message of a conversation", ChatRequest, ChatCompletion
)
COMPLETIONS: Final = _generation("/v1/completions", "What comes after a text", CompletionRequest, TextCompletion)
RESPONSES: Final = _generation(
    "/v1/responses",
    "The next message of a conversation, as OpenAI's newer API says it; nothing is stored",
    ResponsesRequest,
    ResponseObject,
)
EMBEDDINGS: Final = Operation(
    method="POST",
    path="/v1/embeddings",
    summary="The embeddings of texts, from workers of other systems",
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
    summary="The token ids of a text or of a conversation",
    body=TokenizeRequest,
    answer=Tokenized,
    errors=POSTED,
    access=Access.TENANT,
    fan_out=Relay(),
)
DETOKENIZE: Final = Operation(
    method="POST",
    path="/detokenize",
    summary="The text of token ids",
    body=DetokenizeRequest,
    answer=Detokenized,
    errors=POSTED,
    access=Access.TENANT,
    fan_out=Relay(),
)
