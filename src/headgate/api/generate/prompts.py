"""Converts messages and texts to prompts: validates them, renders the chat template, and tokenises.

An input that cannot fit the context is refused by its length, before it is rendered or tokenised. `share` names the share
of the tokeniser threads that is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from headgate.api.generate.jobs import Prompt
from headgate.api.state import LONG_TEXT, Api
from headgate.contract.schema import Message, Object, Part
from headgate.errors import RequestError
from headgate.text.tokenizer import too_long

TEXT_PARTS = ("text", "input_text", "output_text")


async def chat_prompt(
    api: Api,
    messages: Sequence[Message],
    share: str = "",
    *,
    most: int | None = None,
    tools: Sequence[Object] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    variables: Object | None = None,
) -> Prompt:
    """The prompt that the model's chat template renders from `messages`; at most about `most` tokens."""
    template, tokenizer = api.template, api.required_tokenizer
    if template is None:
        raise RequestError("this model has no chat template; use /v1/completions", code="no_chat_template")
    limit = most or api.engines.info.max_context
    tokenizer.check_length(_least_chars(messages), limit)
    goes_on = bool(continue_final_message)
    options: dict[str, Any] = {
        "add_generation_prompt": not goes_on if add_generation_prompt is None else add_generation_prompt,
        "continue_final_message": goes_on,
    }

    def render() -> Prompt:
        plain = [plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        text = template.render(plain, tools=tools or None, **_own(variables, options), **options)
        ids = tuple(tokenizer.encode_within(text, limit, add_special=False))
        continued = str(plain[-1]["content"]) if goes_on else ""
        return Prompt(ids, opened=api.parsers.opened_by(text, continued))

    return await api.off_loop(share, _size([messages, tools, variables]), render)


def _least_chars(messages: Sequence[Message]) -> int:
    """The fewest characters that a template renders. It may trim texts and omit assistant messages."""
    return sum(_stripped(message.content) for message in messages if message.role != "assistant")


def _stripped(content: str | Sequence[Part] | None) -> int:
    if isinstance(content, str):
        return len(content.strip())
    return sum(len((part.text or "").strip()) for part in content or ())


def _size(value: Any) -> int:
    """The approximate length of `value` as text. Counting stops at the length that requires a thread."""
    total, stack = 0, [value]
    while stack and total < LONG_TEXT:
        total += 1
        match stack.pop():
            case str(text):
                total += len(text)
            case dict(items):
                stack += [*items.keys(), *items.values()]
            case list(members) | tuple(members):
                stack += members
            case msgspec.Struct() as struct:
                stack += msgspec.structs.astuple(struct)
    return total


def _own(variables: Object | None, taken: Object) -> Object:
    """The client's template variables; raises if one would replace a field of the body."""
    for name in variables or ():
        if name in taken or name in ("self", "messages", "tools", "documents"):
            raise RequestError(f"{name} is set by other fields of the body", param="chat_template_kwargs")
    return variables or {}


def plain_message(message: Message, where: str) -> dict[str, Any]:
    """A message in the form that templates expect: text content, and no role `developer`, which is newer than most."""
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise RequestError(f"a message with role {message.role} needs content", param=f"{where}.content")
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": text_of(message.content, f"{where}.content"),
    }
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    given = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": reasoning}
    plain |= {name: value for name, value in given.items() if value is not None}
    if message.tool_calls:
        plain["tool_calls"] = msgspec.to_builtins(message.tool_calls)
    return plain


def text_of(content: str | Sequence[Part] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: Part, where: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in (*TEXT_PARTS, "refusal"):
        raise RequestError(
            f"{where} is of type {part.type!r}; this model takes text only", param=where, code="unsupported_content"
        )
    if text is None:
        raise RequestError(f"{where} has no text", param=where)
    return text


async def text_prompts(
    api: Api,
    prompts: Sequence[str | Sequence[int]],
    share: str = "",
    *,
    add_special: bool = True,
    echo: bool = False,
) -> list[Prompt]:
    """All prompts of a request. Their total size decides about threads: many short ones block the loop like a long one."""
    size = sum(map(len, prompts))
    read = partial(text_prompt, api, share=share, size=size, add_special=add_special, echo=echo)
    return [await read(prompt) for prompt in prompts]


async def text_prompt(
    api: Api,
    prompt: str | Sequence[int],
    share: str = "",
    *,
    most: int | None = None,
    size: int = 0,
    add_special: bool = True,
    echo: bool = False,
) -> Prompt:
    """A prompt from text or token ids; a text may have at most about `most` tokens.

    `size` is the total size of the request's prompts, if there are several.
    """
    limit, size = most or api.engines.info.max_context, max(size, len(prompt))
    if isinstance(prompt, str):
        tokenizer = api.required_tokenizer
        tokenizer.check_length(len(prompt), limit)  # before it waits for a thread
        encode = partial(tokenizer.encode_within, prompt, limit, add_special=add_special)
        return Prompt(tuple(await api.off_loop(share, size, encode)), prompt if echo else None)
    if len(prompt) > limit:
        raise too_long(len(prompt), limit)
    if not echo:
        return Prompt(tuple(prompt))
    decode = partial(api.required_tokenizer.decode, prompt, skip_special=False)
    return Prompt(tuple(prompt), await api.off_loop(share, size, decode))
