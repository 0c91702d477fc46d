"""The facts that the router needs from a request body, read once, without parsing the prompt.

The prompt stays as the bytes that the client sent. Conversations grow at the end, so the bytes of one turn are a
prefix of those of the next turn, which is all that the prefix index needs. Workers validate the rest of the body.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from headgate.contract.operations.table import RESTARTED
from headgate.errors import RequestError
from headgate.router.data_path.fast_path import PYTHON, Peek

BYTES_PER_TOKEN: Final = 4  # as in English text; precise enough to compare the load of workers

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # raised for invalid bodies

_NONE: Final = msgspec.Raw()
_UNASKED: Final = frozenset({b"null", b"false"})
_EMPTY: Final = frozenset({b"", b"null", b"[]", b'""'})
_LOGPROBS_ASKED: Final = re.compile(rb'logprobs"\s*:(?!\s*null)')
_NUMBERS: Final = frozenset(bytes([character]) for character in b"0123456789[")


class _Body(msgspec.Struct, gc=False):
    """The fields of a body that are decoded. Raw fields are kept as bytes, and all other fields are skipped."""

    model: str | None = None
    stream: bool | None = None
    request_id: str | None = None
    n: int | None = None
    deadline_ms: float | None = None
    cache_salt: str | None = None
    rid: msgspec.Raw = _NONE  # SGLang's request_id; may be a list
    logprobs: msgspec.Raw = _NONE  # a number or a boolean
    prompt_logprobs: msgspec.Raw = _NONE
    return_logprob: bool | None = None  # SGLang's name of `logprobs`
    sampling_params: msgspec.Raw = _NONE  # SGLang's and vLLM's; vLLM's may ask for log-probabilities
    session_id: msgspec.Raw = _NONE
    user: msgspec.Raw = _NONE
    # Fields whose content precedes the prompt in the input of the model.
    tools: msgspec.Raw = _NONE
    instructions: msgspec.Raw = _NONE
    system: msgspec.Raw = _NONE
    # The prompt, under the names that OpenAI, SGLang, vLLM and TRL give it.
    messages: msgspec.Raw = _NONE
    prompt: msgspec.Raw = _NONE
    input: msgspec.Raw = _NONE
    text: msgspec.Raw = _NONE
    input_ids: msgspec.Raw = _NONE
    token_ids: msgspec.Raw = _NONE
    prompts: msgspec.Raw = _NONE
    sequences: msgspec.Raw = _NONE


class RequestInfo(msgspec.Struct, frozen=True, gc=False):
    model: str | None
    stream: bool
    request_id: str | None
    session: bytes  # identifies a conversation; empty if not given
    n: int  # choices in the answer: `n` times the number of prompts
    root: int  # hash of endpoint, model, tools, salt and tenant; prompts with different roots share no prefix
    prompt: bytes  # the bytes that were sent, without the closing bracket or quote; empty if there is no prompt
    chat: bool  # the prompt is a list of messages
    tokens: int  # estimated number of prompt tokens
    logprobs: bool  # the answer has log-probabilities, or cannot be resumed for another reason
    deadline_ms: float | None = None  # longest time from the arrival to the last token


_decode = msgspec.json.Decoder(_Body).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_name = msgspec.json.Decoder(str).decode


def read_request_info(
    path: str, body: bytes, *, session: str | None = None, tenant: str = "", peek: Peek = PYTHON.peek
) -> RequestInfo:
    """Read the facts from a body. `session` is a routing key from a header, which overrides the body's.

    `peek` is the fast reader, tried first.
    """
    known = peek(body)
    if known is not None:
        model, stream, prompt, chat, tokens = known
        root = hash((path, model, b"", b"", None, tenant))
        prompts = 1 if chat else _prompts_in(prompt)
        key, restarts = session.encode() if session else b"", path in RESTARTED
        return RequestInfo(model, stream, None, key, prompts, root, prompt, chat, tokens, restarts)
    fields = _read(body)
    prompt = _prompt(fields)
    chat = _first(prompt) == b"{"
    return RequestInfo(
        fields.model,
        fields.stream is True,
        fields.request_id or (_name(fields.rid) if fields.rid else None),
        session.encode() if session else bytes(fields.session_id or fields.user),
        (fields.n or 1) * (1 if chat else _prompts_in(prompt)),
        hash((path, fields.model, bytes(fields.tools), _instructions(fields), fields.cache_salt, tenant)),
        prompt,
        chat,
        estimate_tokens(prompt),
        _has_logprobs(fields) or path in RESTARTED,
        fields.deadline_ms,
    )


def _instructions(fields: _Body) -> bytes:
    return bytes(fields.instructions or fields.system)


def _has_logprobs(fields: _Body) -> bool:
    asked = (fields.logprobs, fields.prompt_logprobs)
    return (
        fields.return_logprob is True
        or any(bool(each) and bytes(each) not in _UNASKED for each in asked)
        or _LOGPROBS_ASKED.search(fields.sampling_params) is not None
    )


def _prompts_in(prompt: bytes) -> int:
    """Return the number of prompts in a list of texts, or in a list of lists of token ids."""
    if prompt[:1] != b"[" or _first(prompt) not in (b'"', b"["):
        return 1
    try:
        return len(_decode_list(prompt + b"]")) or 1
    except UNREADABLE:
        return 1  # the list is invalid, and the worker will refuse it


def estimate_tokens(prompt: bytes) -> int:
    """Estimate the number of tokens: one per number in lists of token ids, one per four bytes otherwise."""
    if _first(prompt) in _NUMBERS:
        return prompt.count(b",") + 1
    return len(prompt) // BYTES_PER_TOKEN


def _read(body: bytes) -> _Body:
    try:
        return _decode(body)
    except msgspec.ValidationError as error:
        raise RequestError(f"the router cannot read this request: {error}") from None
    except UNREADABLE as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None


def _prompt(fields: _Body) -> bytes:
    raw = fields.messages or fields.prompt or fields.input or fields.text or fields.input_ids or fields.token_ids
    raw = raw or fields.prompts or fields.sequences
    prompt = bytes(raw)
    return b"" if len(prompt) <= 4 and prompt in _EMPTY else prompt[:-1]


def _first(prompt: bytes) -> bytes:
    """Return the first byte of the first item of a list."""
    return prompt[1:64].lstrip()[:1] if prompt[:1] == b"[" else b""


def _name(raw: msgspec.Raw) -> str | None:
    try:
        return _decode_name(raw) or None
    except UNREADABLE:
        return None
