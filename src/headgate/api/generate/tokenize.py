"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.generate.prompts import chat_prompt, text_prompt
from headgate.api.generate.reading import read_body
from headgate.api.generate.serve import check_model
from headgate.api.state import Api, api_of
from headgate.contract.answers import Detokenized, Tokenized
from headgate.contract.schema import DetokenizeRequest, TokenizeRequest
from headgate.errors import RequestError
from headgate.text.detokenizer import token_bytes

MOST_TOKENS = 1 << 16  # the most tokens of a text, unless the context is longer


async def tokenize(request: Request) -> Response:
    body, api = await read_body(request, TokenizeRequest, MOST_TOKENS), api_of(request)
    check_model(api, body.model)
    tokens = await _tokens(api, body, request.state.share)
    answer = Tokenized(count=len(tokens), max_model_len=api.engines.info.max_context, tokens=tokens)
    if body.return_token_strs:
        answer.token_strs = [token_bytes(api.required_tokenizer, token).decode(errors="replace") for token in tokens]
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _tokens(api: Api, body: TokenizeRequest, share: str) -> tuple[int, ...]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    most = max(api.engines.info.max_context, MOST_TOKENS)
    if body.prompt is not None:
        prompt = await text_prompt(
            api, body.prompt, share, most=most, add_special=body.add_special_tokens is not False
        )
        return prompt.token_ids
    assert body.messages is not None
    prompt = await chat_prompt(
        api,
        body.messages,
        share,
        most=most,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs,
    )
    return prompt.token_ids


async def detokenize(request: Request) -> Response:
    body, api = await read_body(request, DetokenizeRequest), api_of(request)
    check_model(api, body.model)
    tokenizer = api.required_tokenizer
    text = await api.off_loop(
        request.state.share,
        len(body.tokens),
        lambda: tokenizer.decode(body.tokens, skip_special=body.skip_special_tokens is True),
    )
    return Response(msgspec.json.encode(Detokenized(prompt=text)), media_type="application/json")
