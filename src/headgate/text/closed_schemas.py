"""Closes the objects of JSON schemas that list their properties and do not say whether there may be others.

By the standard such an object may have any further properties, and a small model adds them until its tokens run out. In
OpenAI's strict mode objects are closed; so they are here, unless the schema says otherwise: `additionalProperties: true`
and a schema of further properties keep their meaning, and so do keywords that count or describe names.

Schemas that are combined (`allOf`, `$ref` beside other keywords, alternatives beside `properties`) stay as they are,
because properties that one of them lists are further properties of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Object = Mapping[str, Any]

ROOT: Final = "#"
DEFINITIONS: Final = ("$defs", "definitions")
NAMED: Final = frozenset(("properties", "patternProperties", "dependentSchemas"))
ALTERNATIVES: Final = ("allOf", "anyOf", "oneOf")
CONDITIONS: Final = ("not", "if", "then", "else", "dependentSchemas")
FURTHER: Final = ("additionalProperties", "unevaluatedProperties", "propertyNames", "patternProperties")
# Keywords whose values hold schemas: one, a list of them, or (`NAMED`) an object of them.
HOLDERS: Final = frozenset(
    (*ALTERNATIVES, *CONDITIONS, *FURTHER, "properties", "items", "additionalItems", "prefixItems", "contains")
)
COMBINING: Final = frozenset((*ALTERNATIVES, *CONDITIONS, "$ref", "$dynamicRef"))
OPENING: Final = frozenset((*FURTHER, "minProperties"))
OBJECTS: Final = frozenset(("properties", "required")) | OPENING


def closed(schema: Object) -> dict[str, Any]:
    """Return `schema` with its objects closed."""
    places = dict(_places(schema))
    if (kept := _kept_open(places)) is None:
        return dict(schema)
    root: dict[str, Any] = _closed(schema, keep_open=ROOT in kept)
    for holder in DEFINITIONS:
        if isinstance(held := schema.get(holder), Mapping):
            root[holder] = {
                name: _closed(each, keep_open=f"{ROOT}/{holder}/{name}" in kept) for name, each in held.items()
            }
    return root


def _places(schema: Object) -> Iterator[tuple[str, Object]]:
    """The schema and its definitions, by the reference that names them."""
    yield ROOT, schema
    for holder in DEFINITIONS:
        if isinstance(held := schema.get(holder), Mapping):
            for name, each in held.items():
                if isinstance(each, Mapping):
                    yield f"{ROOT}/{holder}/{name}", each


def _closed(schema: Any, *, keep_open: bool) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for keyword, child, opened in _children(schema, keep_open):
        result[keyword] = _mapped(child, keyword, opened)
    if not keep_open and _lists_its_properties(schema):
        result["additionalProperties"] = False
    return result


def _mapped(child: Any, keyword: str, keep_open: bool) -> Any:
    if isinstance(child, list):
        return [_closed(each, keep_open=keep_open) for each in child]
    if keyword in NAMED and isinstance(child, Mapping):
        return {name: _closed(each, keep_open=keep_open) for name, each in child.items()}
    return _closed(child, keep_open=keep_open)


def _lists_its_properties(schema: Object) -> bool:
    listed, required = schema.get("properties"), schema.get("required", ())
    if not isinstance(listed, Mapping) or not OPENING.isdisjoint(schema) or not COMBINING.isdisjoint(schema):
        return False
    return isinstance(required, list | tuple) and all(name in listed for name in required if isinstance(name, str))


def _children(schema: Object, keep_open: bool) -> Iterator[tuple[str, Any, bool]]:
    """The keywords of `schema` that hold schemas, their values, and whether those must stay open."""
    for keyword in schema:
        if keyword in HOLDERS:
            yield keyword, schema[keyword], keep_open or (keyword in COMBINING and not _alone(schema, keyword))


def _alone(schema: Object, keyword: str) -> bool:
    """Whether what `keyword` holds is all that the schema says of an object."""
    combined = len(COMBINING.intersection(schema)) > 1 or not OBJECTS.isdisjoint(schema)
    several = keyword == "allOf" and isinstance(schema[keyword], list) and len(schema[keyword]) > 1
    return not combined and not several and keyword in (*ALTERNATIVES, "$ref")


# ------------------------------------------------------------------------------------------------------------ references


@dataclass(slots=True)
class _References:
    """The references in one place."""

    opening: list[Any] = field(default_factory=list)  # combined with others: the target stays open
    others: list[Any] = field(default_factory=list)  # the target stays open if this place does


def _kept_open(places: Mapping[str, Object]) -> set[str] | None:
    """The places that must stay open; None if one of them is not a definition."""
    found = {name: _references(schema) for name, schema in places.items()}
    kept: set[str] = set()
    waiting = [target for references in found.values() for target in references.opening]
    while waiting:
        target = waiting.pop()
        if not isinstance(target, str) or target not in found:
            return None
        if target not in kept:
            kept.add(target)
            waiting += found[target].others
    return kept


def _references(schema: Object) -> _References:
    found = _References()
    waiting: list[tuple[Any, bool]] = [(schema, False)]
    while waiting:
        each, keep_open = waiting.pop()
        if not isinstance(each, Mapping):
            continue
        if "$ref" in each:
            combined = keep_open or not _alone(each, "$ref")
            (found.opening if combined else found.others).append(each["$ref"])
        if "$dynamicRef" in each:
            found.opening.append(None)
        for keyword, child, opened in _children(each, keep_open):
            inner = child if isinstance(child, list) else [child]
            if keyword in NAMED and isinstance(child, Mapping):
                inner = list(child.values())
            waiting += [(one, opened) for one in inner]
    return found
