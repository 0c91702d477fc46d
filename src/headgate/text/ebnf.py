r"""Converts grammars in EBNF, as llama.cpp (GBNF) and XGrammar write them, to the Lark that engines enforce.

    root ::= "[" item ("," item)* "]"
    item ::= [0-9]+ | root

In EBNF a rule matches characters. An engine divides text into the longest matches of patterns first, so as much of a
grammar as possible becomes one pattern: a rule that does not refer to itself, directly or through others, and the parts of
the other rules between such references. Only where a pattern ends next to such a reference does the longest match decide
how the text is divided.

What cannot be converted is refused by name: lookaheads, macros, and tokens of the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from headgate.errors import RequestError

ROOT: Final = "root"
MOST_NESTED: Final = 64


@dataclass(frozen=True, slots=True)
class Pattern:
    """A text or a set of characters, as Lark writes it."""

    lark: str


@dataclass(frozen=True, slots=True)
class Reference:
    rule: str


@dataclass(frozen=True, slots=True)
class Chain:
    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Options:
    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    item: Expression
    suffix: str  # as Lark writes it


Expression = Pattern | Reference | Chain | Options | Repeat


def is_ebnf(grammar: str) -> bool:
    """Whether a grammar is in EBNF; otherwise it is Lark. As in vLLM, the sign of EBNF is the `::=` of its rules."""
    return _DEFINITION.search(grammar) is not None


def lark_of(grammar: str, *, param: str) -> str:
    """Return the Lark grammar for `grammar`, or raise a RequestError that names what cannot be converted."""
    rules = _Parser(grammar, param).rules()
    if ROOT not in rules:
        raise _refusal(f"the grammar has no rule {ROOT}", param)
    return _LarkWriter(rules, param).lark()


def _refusal(message: str, param: str) -> RequestError:
    return RequestError(f"the grammar cannot be enforced: {message}", param=param)


# --------------------------------------------------------------------------------------------------------------- reading

_DEFINITION: Final = re.compile(r"^[ \t]*[A-Za-z_][\w.-]*[ \t]*::=", re.MULTILINE)
_TOKEN: Final = re.compile(
    r"""(?P<blank>\s+|\#[^\n]*) | (?P<defines>::=)
      | (?P<macro>@[\w-]*|(?:TagDispatch|TokenTagDispatch|ExcludeToken|Token)\()
      | (?P<name>[A-Za-z_][\w.-]*)
      | "(?P<text>(?:[^"\\\n]|\\.)*)" | \[(?P<set>\^?(?:[^\]\\\n]|\\.)*)\] | (?P<any>\.)
      | (?P<token>!?<[^>\n]*>) | (?P<look>\(\s*[=!?])
      | (?P<repeat>[*+?]|\{[\d\s,]*\}) | (?P<mark>[()|]) | (?P<odd>.)""",
    re.VERBOSE,
)
_REFUSED: Final = {"token": "tokens of the model", "look": "lookaheads", "macro": "macros"}
_ESCAPE: Final = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|([^\\])", re.DOTALL)
_CONTROLS: Final = {
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "f": "\f",
    "v": "\v",
    "b": "\b",
    "a": "\a",
    "0": "\0",
    "e": "\x1b",
}


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


def _tokens(grammar: str) -> Iterator[_Token]:
    """The tokens up to the first odd character. No grammar has one, and a search for the end of each bracket or quote
    that has none would take quadratic time.
    """
    line = 1
    for found in _TOKEN.finditer(grammar):
        assert found.lastgroup is not None
        if found.lastgroup != "blank":
            yield _Token(found.lastgroup, found[found.lastgroup], line)
        if found.lastgroup == "odd":
            return
        line += found[0].count("\n")


class _Parser:
    def __init__(self, grammar: str, param: str) -> None:
        self._param = param
        self._tokens = list(_tokens(grammar))
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Expression]:
        rules: dict[str, Expression] = {}
        while (token := self._next()) is not None:
            sign = self._next()
            if token.kind != "name" or sign is None or sign.kind != "defines":
                raise self._unexpected(token)
            if token.text in rules:
                raise _refusal(f"rule {token.text} is defined twice", self._param)
            rules[token.text] = self._options()
        return rules

    def _peek(self, ahead: int = 0) -> _Token | None:
        at = self._at + ahead
        return self._tokens[at] if at < len(self._tokens) else None

    def _next(self) -> _Token | None:
        token = self._peek()
        self._at += 1
        return token

    def _ends_sequence(self, token: _Token) -> bool:
        after = self._peek(1)
        begins_rule = token.kind == "name" and after is not None and after.kind == "defines"
        return begins_rule or (token.kind == "mark" and token.text in ")|")

    def _options(self) -> Expression:
        options = [self._sequence()]
        while (token := self._peek()) is not None and (token.kind, token.text) == ("mark", "|"):
            self._next()
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Options(tuple(options))

    def _sequence(self) -> Expression:
        items: list[Expression] = []
        while (token := self._peek()) is not None and not self._ends_sequence(token):
            items.append(self._repeated(self._item()))
        return items[0] if len(items) == 1 else Chain(tuple(items))

    def _item(self) -> Expression:
        token = self._next()
        assert token is not None
        match token.kind:
            case "name":
                return Reference(token.text)
            case "text":
                return Pattern(json.dumps("".join(self._characters(token)), ensure_ascii=False))
            case "set":
                return Pattern(self._set(token))
            case "any":
                return Pattern("/(?s:.)/")
            case "mark" if token.text == "(":
                return self._group(token)
        raise self._unexpected(token)

    def _group(self, opening: _Token) -> Expression:
        self._depth += 1
        if self._depth > MOST_NESTED:
            raise _refusal(f"groups are nested more than {MOST_NESTED} deep in line {opening.line}", self._param)
        inner, closing = self._options(), self._next()
        if closing is None or closing.text != ")":
            raise _refusal(f"the group that begins in line {opening.line} has no end", self._param)
        self._depth -= 1
        return inner

    def _repeated(self, item: Expression) -> Expression:
        token = self._peek()
        if token is None or token.kind != "repeat":
            return item
        self._next()
        suffix = re.sub(r"\s", "", token.text)
        if suffix[0] == "{" and not re.fullmatch(r"\{\d{1,6}(,\d{0,6})?\}", suffix):
            raise self._unexpected(token)
        return Repeat(item, suffix)

    def _set(self, token: _Token) -> str:
        negated, inner = token.text.startswith("^"), token.text.removeprefix("^")
        # A character is written as its code, because every other way to write it means something to a pattern. A bare
        # hyphen is a range, except at the ends.
        written = "".join(
            _code(char) if quoted or char != "-" else "-" for char, quoted in self._spelled(token, inner)
        )
        written = re.sub(r"^-|-$", lambda _: _code("-"), written)
        if not written:
            raise _refusal(f"the set of characters in line {token.line} is empty", self._param)
        return f"/[{'^' if negated else ''}{written}]/"

    def _characters(self, token: _Token) -> Iterator[str]:
        return (char for char, _ in self._spelled(token, token.text))

    def _spelled(self, token: _Token, text: str) -> Iterator[tuple[str, bool]]:
        """The characters of a text or set, and whether they are escaped."""
        for escape, char in _ESCAPE.findall(text):
            if char:
                yield char, False
            elif escape[0] in "xuU" and len(escape) > 1:
                code = int(escape[1:], 16)
                if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                    raise _refusal(f"\\{escape} in line {token.line} is not a character", self._param)
                yield chr(code), True
            elif escape.isalnum() and escape not in _CONTROLS:
                raise _refusal(f"the escape \\{escape} in line {token.line} is not supported", self._param)
            else:
                yield _CONTROLS.get(escape, escape), True

    def _unexpected(self, token: _Token) -> RequestError:
        if token.kind in _REFUSED:
            what = f"{_REFUSED[token.kind]} are not supported ({token.text!r:.40} in line {token.line})"
        else:
            what = f"unexpected {token.text!r:.40} in line {token.line}"
        return _refusal(what, self._param)


def _code(char: str) -> str:
    return f"\\u{{{ord(char):x}}}"


# --------------------------------------------------------------------------------------------------------------- writing


class _LarkWriter:
    """Writes rules in Lark: `r_0` is a rule there, `T_0` a pattern."""

    def __init__(self, rules: Mapping[str, Expression], param: str) -> None:
        self._rules, self._param = rules, param
        self._flat = _without_recursion(rules, param)
        self._names = {name: f"T_{i}" if name in self._flat else f"r_{i}" for i, name in enumerate(rules)}
        self._lines: list[str] = []
        self._parts = 0

    def lark(self) -> str:
        for name, body in self._rules.items():
            written = self._pattern(body) if name in self._flat else self._rule(body)
            self._lines.append(f"{self._names[name]}: {written}")
        return "\n".join([f"start: {self._names[ROOT]}", *self._lines]) + "\n"

    def _pattern(self, node: Expression) -> str:
        return _written(node, self._pattern, lambda rule: self._names[rule])

    def _rule(self, node: Expression) -> str:
        """The text of a recursive expression, whose parts without recursion are patterns of their own."""
        match node:
            case Chain(items):
                return " ".join(self._runs(items))
            case Options(items):
                flat = tuple(item for item in items if self._is_flat(item))
                options = [self._rule(item) for item in items if not self._is_flat(item)]
                return f"({' | '.join([*options, *([self._part(Options(flat))] if flat else [])])})"
        return _written(node, self._rule, lambda rule: self._names[rule])

    def _runs(self, items: tuple[Expression, ...]) -> Iterator[str]:
        run: list[Expression] = []
        for item in items:
            if self._is_flat(item):
                run.append(item)
                continue
            if run:
                yield self._part(Chain(tuple(run)))
                run = []
            yield self._rule(item)
        if run:
            yield self._part(Chain(tuple(run)))

    def _part(self, node: Expression) -> str:
        """The name of a new pattern for `node`."""
        self._parts += 1
        name = f"P_{self._parts}"
        self._lines.append(f"{name}: {self._pattern(node)}")
        return name

    def _is_flat(self, node: Expression) -> bool:
        return all(rule in self._flat for rule in _references(node))


def _written(node: Expression, inner: Callable[[Expression], str], named: Callable[[str], str]) -> str:
    match node:
        case Pattern(lark):
            return lark
        case Reference(rule):
            return named(rule)
        case Chain(items):
            return f"({' '.join(map(inner, items))})" if items else '""'
        case Options(items):
            return f"({' | '.join(map(inner, items))})"
        case Repeat(item, suffix):
            return f"({inner(item)}){suffix}"


def _references(node: Expression) -> Iterator[str]:
    match node:
        case Reference(rule):
            yield rule
        case Chain(items) | Options(items):
            for item in items:
                yield from _references(item)
        case Repeat(item):
            yield from _references(item)


def _without_recursion(rules: Mapping[str, Expression], param: str) -> set[str]:
    """The rules that cannot reach themselves, nor a rule that can."""
    needs = {name: set(_references(body)) for name, body in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, needed in needs.items():
        for other in needed:
            if other not in rules:
                raise _refusal(f"rule {name} refers to {other}, which is not defined", param)
            users[other].append(name)
    flat = {name for name, needed in needs.items() if not needed}
    ready = list(flat)
    while ready:
        done = ready.pop()
        for user in users[done]:
            needs[user].discard(done)
            if not needs[user] and user not in flat:
                flat.add(user)
                ready.append(user)
    return flat
