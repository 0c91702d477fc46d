"""Chat templates: renders messages to prompt text with the Jinja template of the model.

This module finds templates, prepares their inputs, and turns their errors into request errors.
`headgate.text.sandbox` keeps them from doing harm.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from headgate.errors import BrokenCheckpoint, RequestError
from headgate.model_store.gguf import read_gguf
from headgate.text.sandbox import Sandbox, TemplateLimits, render
from headgate.text.tokenizer import read_json

Message = Mapping[str, Any]


class ChatTemplate:
    """The templates of one model, ready to render. Safe to share between threads."""

    def __init__(
        self,
        sources: str | Mapping[str, str],
        *,
        variables: Mapping[str, str] | None = None,
        limits: TemplateLimits | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Load `sources`, by name; "default" and "tool_use" are used. `variables` are the special tokens."""
        self._variables = dict(variables or {})
        self._limits = limits or TemplateLimits()
        named = {"default": sources} if isinstance(sources, str) else dict(sources)
        self.source = "\n".join(named.values())  # the text of all templates, for detecting the model family
        sandbox = Sandbox(now)
        self._templates = {name: sandbox.load(name, source) for name, source in named.items()}

    def __repr__(self) -> str:
        return f"<ChatTemplate {', '.join(self._templates)}>"

    @cached_property
    def takes_tools(self) -> bool:
        """Whether a template mentions `tools` at all. One that does not would ignore them."""
        return re.search(r"\btools\b", self.source) is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> str:
        """Render the prompt. `extra` is passed to the template as variables, e.g. `enable_thinking`.

        With `continue_final_message` the prompt ends where the last message does, so that the model continues it.
        """
        if not messages:
            raise RequestError("messages must not be empty", param="messages")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message cannot be combined with add_generation_prompt", param="continue_final_message"
            )
        prepared = [_prepared(message, flatten=not self._takes_parts) for message in messages]
        final = _mark_final(prepared) if continue_final_message else None
        prompt = self._run(
            messages=prepared,
            tools=_plain(tools, "tools") if tools else None,
            documents=_plain(documents, "documents") if documents else None,
            add_generation_prompt=add_generation_prompt,
            **_plain(extra, "chat_template_kwargs"),
        )
        return prompt if final is None else _cut_at_mark(prompt, final)

    def _run(self, **variables: Any) -> str:
        template = self._choose(with_tools=variables["tools"] is not None)
        try:
            prompt = render(template, {**self._variables, **variables}, self._limits)
            # Encoding fails as it would in the tokenizer, for text from JSON within JSON that has no UTF-8 encoding.
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt would not be valid text: {error}", param="messages") from error
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            # The error may quote characters that have no UTF-8 encoding.
            complaint = str(error).encode(errors="backslashreplace").decode()
            raise RequestError(f"the model's chat template says: {complaint}", param="messages") from error
        except RecursionError as error:
            raise RequestError("the model's chat template calls itself without end", param="messages") from error
        return prompt

    def _choose(self, *, with_tools: bool) -> jinja2.Template:
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            known = ", ".join(self._templates)
            raise RequestError(f"the model has no default chat template; it has {known}", param="messages")
        return self._templates[name]

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether content may be a list of parts; many templates accept text only. Determined by rendering a probe."""
        probe = "a needle in the hay"
        message = {"role": "user", "content": [{"type": "text", "text": probe}]}
        try:
            prompt = self._run(messages=[message], tools=None, documents=None, add_generation_prompt=False)
        except RequestError:
            return False
        return probe in prompt and "'text'" not in prompt and '"text"' not in prompt


def load_template(model: Path, **options: Any) -> ChatTemplate | None:
    """Return the chat template of a model folder or GGUF file; None if it has none."""
    try:
        if model.is_file():
            sources, variables = _gguf_sources(model)
        else:
            config = read_json(model / "tokenizer_config.json")
            sources, variables = _folder_sources(model, config), _special_tokens(config)
    except (TypeError, ValueError, LookupError, AttributeError) as error:  # stored in an unexpected form
        raise BrokenCheckpoint(f"the chat templates of {model} are malformed: {error!r:.200}") from error
    if odd := [name for name, source in sources.items() if not isinstance(source, str)]:
        raise BrokenCheckpoint(f"chat template {odd[0]!r} of {model} is not text")
    return ChatTemplate(sources, variables=variables, **options) if sources else None


# ----------------------------------------------------------------------------------------- locations of templates


def _folder_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Read the templates of a folder, by name; newer locations take precedence over older ones."""
    in_config = config.get("chat_template") or {}
    if isinstance(in_config, list):
        in_config = {entry["name"]: entry["template"] for entry in in_config}
    elif isinstance(in_config, str):
        in_config = {"default": in_config}
    in_json = read_json(folder / "chat_template.json").get("chat_template")
    sources = in_config | ({"default": in_json} if in_json else {})
    if (single := folder / "chat_template.jinja").is_file():
        sources["default"] = single.read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = path.read_text(encoding="utf-8")
    return sources


def _gguf_sources(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    metadata = read_gguf(path).metadata
    prefix = "tokenizer.chat_template"
    sources = {key[len(prefix) + 1 :] or "default": text for key, text in metadata.items() if key.startswith(prefix)}
    sources.pop("s", None)  # tokenizer.chat_templates: the list of names
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return sources, {f"{name}_token": tokens[at] for name, at in ids.items() if at is not None and at < len(tokens)}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `bos_token` and similar, which the config stores as text or as an object with a `content`."""
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value["content"] if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


# -------------------------------------------------------------------------------------------- inputs of templates


def _prepared(message: Message, *, flatten: bool) -> dict[str, Any]:
    """Return a copy of a message in plain types, in the form that templates expect."""
    plain: dict[str, Any] = _plain(message, "messages")
    content = plain.get("content")
    if flatten and isinstance(content, list):
        plain["content"] = "\n".join(map(_part_text, content))
    for call in plain.get("tool_calls") or ():
        _parse_arguments(call.get("function", {}))
    return plain


def _part_text(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    raise RequestError("this model accepts text only; content parts must have a text", param="messages")


def _parse_arguments(function: dict[str, Any]) -> None:
    """Parse the arguments of a call in place: over HTTP they are JSON in a string, but templates expect an object.

    Arguments that are invalid or nested too deep stay unchanged. A client may, for example, send back a truncated
    answer of a model.
    """
    if isinstance(function.get("arguments"), str):
        with suppress(ValueError, RecursionError):
            function["arguments"] = _plain(json.loads(function["arguments"] or "{}"), "messages")


_DEEPEST = 200  # nested lists and objects; well below Python's recursion limit


def _plain(value: Any, param: str, depth: int = 0) -> Any:
    """Return a copy in plain JSON types, because an object with methods could be a way out of the sandbox."""
    if depth > _DEEPEST:
        raise RequestError(f"{param} is nested more than {_DEEPEST} deep", param=param)
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case Mapping():
            return {str(key): _plain(item, param, depth + 1) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item, param, depth + 1) for item in value]
    raise RequestError(f"a chat template cannot be given a {type(value).__name__}", param=param)


_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # the trailing space shows whether the template trims messages


def _mark_final(messages: list[dict[str, Any]]) -> str:
    """Put a mark at the end of the last message, and return the text before it."""
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = content + _MARK
        return content
    for part in reversed(content) if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _MARK
            return text
    raise RequestError("the final message has no text to continue", param="continue_final_message")


def _cut_at_mark(prompt: str, final: str) -> str:
    at = prompt.rfind(_MARK.strip())
    if at < 0 or final.strip() not in prompt:
        raise RequestError("the chat template omits the message to continue", param="continue_final_message")
    trimmed = not prompt.startswith(_MARK, at)
    return prompt[:at].rstrip() if trimmed else prompt[:at]
