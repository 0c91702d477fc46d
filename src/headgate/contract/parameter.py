"""Declares sampling parameters: from a table of them follow the checks, the body fields and the names in every API.

A table is a msgspec struct whose fields are annotated with `SamplingParameter`: the struct gives name, type and default,
the annotation everything else. `contract.sampling` has the tables; this module does not depend on single parameters.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args, get_type_hints

import msgspec
from msgspec import NODEFAULT

Api = Literal["chat", "completions", "responses", "messages", "sglang", "vllm"]
APIS: tuple[Api, ...] = get_args(Api)

# ------------------------------------------------------------------------------------------------------- allowed values


class Rule(Protocol):
    """A condition on a value. `words` completes the sentence "NAME must be ..."."""

    @property
    def words(self) -> str: ...

    def holds(self, value: Any) -> bool: ...


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, inclusive; NaN is in no range."""

    low: float
    high: float
    phrase: str = ""
    above: bool = False  # `low` itself is excluded

    @property
    def words(self) -> str:
        return self.phrase or f"between {self.low:g} and {self.high:g}"

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.above and value == self.low)


@dataclass(frozen=True, slots=True)
class Values:
    """An object whose values are all in `range`."""

    range: Range

    @property
    def words(self) -> str:
        return self.range.words

    def holds(self, value: Any) -> bool:
        return all(map(self.range.holds, value.values()))


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Integers that fit the 32-bit words of a cache key. Whether an id is in the vocabulary is checked by the engine."""

    words: str

    def holds(self, value: Any) -> bool:
        return are_token_ids(value)


@dataclass(frozen=True, slots=True)
class Characters:
    """A text of 1 to `most` characters."""

    most: int

    @property
    def words(self) -> str:
        return f"between 1 and {self.most} characters long"

    def holds(self, value: Any) -> bool:
        return 0 < len(value) <= self.most


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of some names."""

    names: tuple[str, ...]

    @property
    def words(self) -> str:
        return f"one of {', '.join(self.names)}"

    def holds(self, value: Any) -> bool:
        return value in self.names


def are_token_ids(tokens: Iterable[int]) -> bool:
    try:
        array("I", tokens)  # the fastest way to check each element
    except OverflowError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------------- declaration


@dataclass(frozen=True, slots=True)
class Column:
    """The numpy type of a parameter in the device's rows, and the value that stands for None."""

    dtype: str
    absent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameter:
    """One parameter. `table_of` fills in `name`, `kind` and `default` from the struct's field."""

    summary: str
    rules: tuple[Rule, ...] = ()  # checked when the value is constructed: code `invalid_value`
    json: Any = None  # type in request bodies; a mismatch has the code `invalid_type`; None: `kind`
    read: Callable[[Any], Any] | None = None  # converts the JSON value to ours, if they differ
    apis: Collection[Api] = APIS  # the APIs that have a field for it
    # Names in APIs that do not use `name`. If a request sets several of them, the first one listed here counts.
    names: Mapping[Api, tuple[str, ...]] = field(default_factory=dict)
    defaults: Mapping[Api, Any] = field(default_factory=dict)  # in APIs whose default is not `default`
    column: Column | None = None  # in the device's rows

    name: str = ""
    kind: Any = None
    default: Any = None

    def names_in(self, api: Api) -> tuple[str, ...]:
        return self.names.get(api, (self.name,)) if api in self.apis else ()


Table = Mapping[str, SamplingParameter]


def table_of(struct: type[msgspec.Struct]) -> Table:
    """The parameters that the fields of `struct` declare, in field order."""
    hints = get_type_hints(struct, include_extras=True)
    return {each.name: _completed(each, hints[each.name]) for each in msgspec.structs.fields(struct)}


def _completed(declared: msgspec.structs.FieldInfo, hint: Any) -> SamplingParameter:
    kind, about = get_args(hint)
    assert isinstance(about, SamplingParameter), f"{declared.name} is not annotated with a SamplingParameter"
    default = declared.default if declared.default_factory is NODEFAULT else declared.default_factory()
    json = kind if about.json is None else about.json
    return replace(about, name=declared.name, kind=kind, default=default, json=json)


# -------------------------------------------------------------------------------------------------------------- derived


Check = tuple[str, Any, tuple[Rule, ...]]


def checks_of(table: Table) -> tuple[Check, ...]:
    """The name, default and rules of each parameter."""
    return tuple((each.name, each.default, each.rules) for each in table.values())


def check(values: tuple[Any, ...], checks: tuple[Check, ...]) -> None:
    """Raise ValueError for the first value that breaks a rule. Defaults, which most values are, are not checked."""
    for value, (name, default, rules) in zip(values, checks, strict=True):
        if value != default:
            for rule in rules:
                if not rule.holds(value):
                    raise ValueError(f"{name} must be {rule.words}")


def require(name: str, ok: bool, words: str) -> None:
    if not ok:
        raise ValueError(f"{name} must be {words}")


def body_fields(table: Table, apis: Collection[Api]) -> Iterator[tuple[str, Any, None]]:
    """The fields that all of `apis` accept, as `msgspec.defstruct` takes them. None stands for the default."""
    for parameter in table.values():
        first, *others = (parameter.names_in(api) for api in apis)
        for name in first:
            if all(name in names for names in others):
                yield name, parameter.json | None, None


Reader = tuple[str, str, Callable[[Any], Any] | None]


def readers_of(table: Table, api: Api) -> tuple[Reader, ...]:
    """For each field of a body of `api`: its name, the parameter's name, and how its value is converted.

    If a parameter has several names, the preferred one comes last, so that it replaces the others.
    """
    return tuple((name, each.name, each.read) for each in table.values() for name in reversed(each.names_in(api)))


def given(body: msgspec.Struct, readers: tuple[Reader, ...]) -> dict[str, Any]:
    """The parameters that `body` sets, by the names in the table."""
    values: dict[str, Any] = {}
    for name, parameter, read in readers:
        value = getattr(body, name)
        if value is not None:
            values[parameter] = value if read is None else read(value)
    return values


def translation(table: Table, source: Api, target: Api) -> dict[str, str]:
    """Maps names in `source` to names in `target`, for all parameters that both APIs accept."""
    shared = [each for each in table.values() if {source, target} <= set(each.apis)]
    return {name: each.names_in(target)[0] for each in shared for name in each.names_in(source)}
