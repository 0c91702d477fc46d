"""Structural tags, as XGrammar defines them and vLLM and SGLang accept them.

A field that is not listed here is refused by name, and so is a format of another type.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headgate.contract.decoding import convert
from headgate.errors import RequestError

Text = Annotated[str, Meta(min_length=1)]
Texts = Annotated[list[Text], Meta(min_length=1)]


class _Format(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class ConstString(_Format, tag="const_string"):
    value: str


class SchemaFormat(_Format, tag="json_schema"):
    json_schema: dict[str, Any] | bool
    style: Literal["json"] = "json"


class RegexFormat(_Format, tag="regex"):
    pattern: str


class GrammarFormat(_Format, tag="grammar"):
    grammar: str


class AnyText(_Format, tag="any_text"):
    excludes: list[Text] = []


class SequenceFormat(_Format, tag="sequence"):
    elements: Annotated[list[Format], Meta(min_length=1)]


class OrFormat(_Format, tag="or"):
    elements: Annotated[list[Format], Meta(min_length=1)]


class OptionalFormat(_Format, tag="optional"):
    content: Format


class StarFormat(_Format, tag="star"):
    content: Format


class PlusFormat(_Format, tag="plus"):
    content: Format


class TagFormat(_Format, tag="tag"):
    begin: str
    content: Format
    end: str | list[str]

    @property
    def ends(self) -> tuple[str, ...]:
        return tuple(filter(None, [self.end] if isinstance(self.end, str) else self.end))


class Tag(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tag in a list of tags, where its type may be left out."""

    begin: Text
    content: Format
    end: str | list[str]
    type: Literal["tag"] = "tag"

    @property
    def whole(self) -> TagFormat:
        return TagFormat(begin=self.begin, content=self.content, end=self.end)


Tags = Annotated[list[Tag], Meta(min_length=1)]


class TriggeredTags(_Format, tag="triggered_tags"):
    triggers: Texts
    tags: Tags
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: list[Text] = []


class TagsWithSeparator(_Format, tag="tags_with_separator"):
    tags: Tags
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    ConstString
    | SchemaFormat
    | RegexFormat
    | GrammarFormat
    | AnyText
    | SequenceFormat
    | OrFormat
    | OptionalFormat
    | StarFormat
    | PlusFormat
    | TagFormat
    | TriggeredTags
    | TagsWithSeparator
)


class _Current(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: Format
    type: Literal["structural_tag"] = "structural_tag"


class _Structure(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    begin: Text
    schema: dict[str, Any] | bool
    end: str


class _Older(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form before XGrammar 0.1.25: tags that contain JSON, in free text."""

    structures: Annotated[list[_Structure], Meta(min_length=1)]
    triggers: Texts
    type: Literal["structural_tag"] = "structural_tag"


def format_of(value: dict[str, Any], param: str) -> Format:
    """The format that a structural tag declares in its current or older form."""
    try:
        if "structures" not in value:
            current: _Current = convert(value, _Current, param)
            return current.format
        older: _Older = convert(value, _Older, param)
    except RecursionError:
        raise RequestError("the structural tag is nested too deeply", param=param) from None
    tags = [
        Tag(begin=each.begin, content=SchemaFormat(json_schema=each.schema), end=each.end)
        for each in older.structures
    ]
    return TriggeredTags(triggers=older.triggers, tags=tags)
