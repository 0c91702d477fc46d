"""Grammars for structural tags: free text with tags whose contents follow a schema, a pattern or a grammar.

    {"type": "triggered_tags", "triggers": ["<tool"], "tags": [
        {"begin": "<tool=now>", "content": {"type": "json_schema", "json_schema": {...}}, "end": "</tool>"}]}

A format becomes a list of parts. Consecutive patterns become one, so that a text ends exactly where the part after it
begins. Free text contains neither the trigger of a tag nor the end of the tag around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from headgate.contract import structural_tag as tags
from headgate.contract.structural_tag import Format, TagFormat, format_of
from headgate.errors import RequestError
from headgate.text.constraints import check_size, checked, context_free, literal, pattern, schema_rule

MOST_NESTED: Final = 32
MOST_TRIGGERS: Final = 128
ANYTHING: Final = "/(?s:.*)/"
SOMETHING: Final = "/(?s:.+)/"


def structural_tag(value: dict[str, Any], *, param: str = "grammar") -> str:
    """Return the grammar of answers with structural tags."""
    return checked(_TagWriter(param).grammar(format_of(value, param)), param=param, foreign=True)


@dataclass(frozen=True, slots=True)
class _Part:
    lark: str
    flat: bool  # a pattern, or the name of a rule


Parts = list[_Part]


class _TagWriter:
    def __init__(self, param: str) -> None:
        self._param = param
        self._lines: list[str] = []
        self._chars = 0  # of the lines
        self._depth = 0
        self._part_chars = 0  # of all parts, counted once for each format around them

    def grammar(self, format: Format) -> str:
        start = self._joined(self._parts(format, (), last=True))
        return "\n".join([f"start: {start}", *self._lines]) + "\n"

    def _parts(self, format: Format, ends: tuple[str, ...], *, last: bool) -> Parts:
        """The parts of `format` and of one of `ends`, if there are any. `last`: nothing follows in the answer."""
        self._depth += 1
        if self._depth > MOST_NESTED:
            raise self._refusal(f"formats are nested more than {MOST_NESTED} deep")
        parts = self._parts_of(format, ends, last)
        self._part_chars += sum(len(part.lark) for part in parts)
        check_size(self._part_chars // MOST_NESTED, self._param)  # patterns are not lines until they are complete
        self._depth -= 1
        return parts

    def _parts_of(self, format: Format, ends: tuple[str, ...], last: bool) -> Parts:
        match format:
            case tags.AnyText():
                return [self._free_text(format.excludes, ends, last=last)]
            case tags.SequenceFormat():
                *others, final = format.elements
                parts = [part for each in others for part in self._parts(each, (), last=False)]
                return parts + self._parts(final, ends, last=last)
            case tags.OrFormat():
                return [self._either([self._parts(each, ends, last=last) for each in format.elements])]
            case TagFormat():
                open_ended = last and not ends
                inner = self._parts(format.content, format.ends, last=open_ended)
                return [*_text(format.begin), *inner, *_one_of(ends)]
            case tags.TriggeredTags():
                return self._triggered(format, ends, last=last)
        return [*self._closed(format), *_one_of(ends)]

    def _closed(self, format: Format) -> Parts:
        """The parts of a format that says itself where it ends."""
        match format:
            case tags.ConstString(value):
                return _text(value)
            case tags.RegexFormat(written):
                return [_Part(pattern(written), flat=True)]
            case tags.SchemaFormat(schema):
                return [self._rule(schema_rule(schema, param=self._param))]
            case tags.GrammarFormat(written):
                return [self._rule(f"%lark {{\n{context_free(written, param=self._param)}\n}}")]
            case tags.OptionalFormat(content):
                return [self._repeated(self._parts(content, (), last=False), "?")]
            case tags.StarFormat(content):
                return [self._repeated(self._parts(content, (), last=False), "*")]
            case tags.PlusFormat(content):
                return [self._repeated(self._parts(content, (), last=False), "+")]
            case tags.TagsWithSeparator():
                return [self._separated(format)]
        raise AssertionError(format)

    # -- tags -------------------------------------------------------------------

    def _triggered(self, format: tags.TriggeredTags, ends: tuple[str, ...], *, last: bool) -> Parts:
        if len(format.triggers) > MOST_TRIGGERS:
            raise self._refusal(f"{len(format.triggers)} triggers; at most {MOST_TRIGGERS} are accepted")
        whole = [self._parts(tag.whole, (), last=False) for tag in format.tags] if format.at_least_one else []
        if format.at_least_one and format.stop_after_first:
            return [self._either(whole), *_one_of(ends)]
        stops = (*format.triggers, *format.excludes)
        tagged, rest = self._after_text(format, (*stops, *ends)), self._free_text(stops, ends, last=last)
        if format.stop_after_first:
            return [self._either([[tagged, *_one_of(ends)], [rest]])]
        first = [self._either(whole)] if whole else []
        return [*first, self._repeated([tagged], "*"), rest]

    def _after_text(self, format: tags.TriggeredTags, stops: Sequence[str]) -> _Part:
        """Free text up to a trigger, and the tag that begins with the trigger."""
        options: list[Parts] = []
        for trigger in format.triggers:
            begun = [tag for tag in format.tags if tag.begin.startswith(trigger)]
            inner = [
                [*_text(tag.begin[len(trigger) :]), *self._parts(tag.content, tag.whole.ends, last=False)]
                for tag in begun
            ]
            if inner:
                # Two rules, because the text ends with the trigger: what follows is not part of the same pattern.
                head = self._rule(self._joined([_Part(_until([trigger], stops), flat=True)]))
                options.append([head, self._either(inner)])
        for tag in format.tags:
            if not any(tag.begin.startswith(trigger) for trigger in format.triggers):
                raise self._refusal(f"the tag {tag.begin!r:.100} begins with none of the triggers")
        return self._either(options)

    def _separated(self, format: tags.TagsWithSeparator) -> _Part:
        tag = self._either([self._parts(each.whole, (), last=False) for each in format.tags])
        more = [] if format.stop_after_first else [self._repeated([*_text(format.separator), tag], "*")]
        return self._repeated([tag, *more], "" if format.at_least_one else "?")

    def _free_text(self, excludes: Sequence[str], ends: tuple[str, ...], *, last: bool) -> _Part:
        if ends:
            return _Part(_until(ends, (*excludes, *ends)), flat=True)
        if not last and not excludes:
            raise self._refusal("free text needs an end: only the last part of an answer may have none")
        return _Part(_without(excludes), flat=True)

    # -- rules ------------------------------------------------------------------

    def _either(self, options: Sequence[Parts]) -> _Part:
        if all(part.flat for parts in options for part in parts):
            return _Part(f"({' | '.join(_pattern(parts) for parts in options)})", flat=True)
        return self._rule(" | ".join(map(self._joined, options)))

    def _repeated(self, parts: Parts, suffix: str) -> _Part:
        if all(part.flat for part in parts):
            return _Part(f"({_pattern(parts)}){suffix}", flat=True)
        return self._rule(f"({self._joined(parts)}){suffix}")

    def _joined(self, parts: Parts) -> str:
        """The text of a rule that has these parts."""
        runs = [(flat, list(run)) for flat, run in groupby(parts, key=lambda part: part.flat)]
        return " ".join(
            self._named("P", _pattern(run)) if flat else " ".join(part.lark for part in run) for flat, run in runs
        )

    def _rule(self, lark: str) -> _Part:
        return _Part(self._named("r", lark), flat=False)

    def _named(self, prefix: str, lark: str) -> str:
        name = f"{prefix}_{len(self._lines)}"
        self._chars += len(lark)
        check_size(self._chars, self._param)  # before more is written: nested triggers repeat their tags
        self._lines.append(f"{name}: {lark}")
        return name

    def _refusal(self, message: str) -> RequestError:
        return RequestError(f"the structural tag cannot be enforced: {message}", param=self._param)


def _text(text: str) -> Parts:
    return [_Part(literal(text), flat=True)] if text else []


def _one_of(texts: Sequence[str]) -> Parts:
    return [_Part(_any(texts), flat=True)] if texts else []


def _any(texts: Iterable[str]) -> str:
    return f"({' | '.join(map(literal, texts))})"


def _pattern(parts: Parts) -> str:
    return f"({' '.join(part.lark for part in parts)})" if parts else '""'


def _until(ends: Iterable[str], stops: Iterable[str]) -> str:
    """Text up to the first of `stops`, which is one of `ends`."""
    return f"(({ANYTHING} {_any(ends)}) & ~({ANYTHING} {_any(stops)} {SOMETHING}))"


def _without(texts: Sequence[str]) -> str:
    """Text that contains none of `texts`."""
    return f"({ANYTHING} & ~({ANYTHING} {_any(texts)} {ANYTHING}))" if texts else ANYTHING
