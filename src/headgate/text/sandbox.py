"""Runs chat templates, which are untrusted programs.

A template runs in Jinja's immutable sandbox on JSON data, so it cannot reach files, modules or Python internals.
It also has a budget:

- time: checked in every loop iteration, macro or method call, piece of output, and created value;
- size: of the prompt, of every text or list that an operator, slice, method or filter creates, and of all of them
  together, which bounds memory. Operations whose result can be larger than their operands are checked *before* they
  run. Operations that expand a small input and that no chat template needs (format strings, padding filters, bytes,
  sums of lists) are not available;
- weight: a list that contains one list many times is small, but its text can be unbounded. Before a list is written,
  compared, hashed or sorted as a whole, the length of its text is charged. Integers have at most `LONGEST_INT` bits.

Not bounded: the time of a single operation that Python does in C on data of that size, such as sorting a list; the
text of the template itself that a loop collects (only the time limit applies); and compilation, which happens once,
at start-up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, do_int, do_join, do_replace, sync_do_sum
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from headgate.errors import BrokenCheckpoint


@dataclass(frozen=True)
class TemplateLimits:
    chars: int = 4_000_000  # characters of the prompt, and of any intermediate value
    chars_in_all: int = 200_000_000  # characters of all intermediate values together
    seconds: float = 2.0


# --------------------------------------------------------------------------------------------------------- the budget


LONGEST_INT = 4096  # bits
LONGEST_PATTERN = 256  # characters of a date format, each of which can expand to many


class _Budget:
    """The remaining resources of one rendering."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._deadline = time.monotonic() + limits.seconds
        self._last = time.thread_time() + limits.seconds
        self._made = 0

    def tick(self) -> None:
        # The limit is on this thread's CPU time: a template must not fail because the machine was busy. The monotonic
        # clock is checked first, because it is ten times cheaper to read and advances at least as fast.
        if time.monotonic() > self._deadline and time.thread_time() > self._last:
            raise SecurityError(f"it ran for more than {self._limits.seconds} s")

    def spend(self, size: int) -> None:
        """Charge a value of `size` characters or members to the budget."""
        self.tick()
        self._made += max(size, 0)
        if size > self._limits.chars or self._made > self._limits.chars_in_all:
            raise SecurityError(f"it makes texts of more than {self._limits.chars} characters, or too many of them")

    def spend_on_text_of(self, value: Any) -> None:
        self.spend(_text_length(value, self._limits.chars))

    def spend_on_joining(self, items: Sequence[Any], separator: str) -> None:
        self.spend(len(separator) * len(items))
        self.spend_on_text_of(items)

    def collect(self, pieces: Iterable[str]) -> str:
        """Join the pieces; raise as soon as the text exceeds the limit."""
        total, kept = 0, []
        for piece in pieces:
            self.tick()
            total += len(piece)
            if total > self._limits.chars:
                raise SecurityError(f"it makes a prompt of more than {self._limits.chars} characters")
            kept.append(piece)
        return "".join(kept)


def render(template: jinja2.Template, variables: Mapping[str, Any], limits: TemplateLimits) -> str:
    """Run a template loaded by `Sandbox.load`. Errors and exceeded limits raise jinja2.TemplateError."""
    budget = _Budget(limits)
    token = _budget.set(budget)
    try:
        return budget.collect(template.generate(variables))
    finally:
        _budget.reset(token)


# Each rendering has its own budget; a context variable, because threads share templates and their environment.
_budget: ContextVar[_Budget] = ContextVar("budget")


def _text_length(value: Any, enough: int) -> int:
    """The approximate length of a value as text. Counting stops at `enough`, because shared lists can be endless."""
    total, stack = 0, [value]
    while stack and total <= enough:
        match stack.pop():
            case str(text):
                total += len(text)
            case dict(items):
                total += 4 * len(items)
                stack += [*items.keys(), *items.values()]
            case list(members) | tuple(members):
                total += 2 * len(members)
                stack += members
            case KeysView() | ValuesView() | ItemsView() as view:
                total += 2 * len(view)
                stack += view
            case _:
                total += 1
    return total


def _weighed(value: Any) -> Any:
    """Charge a value that is about to be read completely, and return it."""
    if isinstance(value, _CONTAINERS):
        _budget.get().spend_on_text_of(value)
    return value


_CONTAINERS = (list, tuple, dict, KeysView, ValuesView, ItemsView)


def _check_binop(operator: str, left: Any, right: Any) -> None:
    budget = _budget.get()
    match operator, left, right:
        case _, int(), int():
            _check_numbers(operator, left, right)
        case ("*", int(times), str() | list() | tuple() as value) | (
            "*",
            str() | list() | tuple() as value,
            int(times),
        ):
            budget.spend(len(value) * times)
        case "+", str() | list() | tuple(), str() | list() | tuple():
            budget.spend(len(left) + len(right))
        case "%", str(), _:
            raise SecurityError("formatting with % is not allowed; use ~ or a filter")


def _check_numbers(operator: str, left: int, right: int) -> None:
    bits = left.bit_length() * max(right, 1) if operator == "**" else max(left.bit_length(), right.bit_length())
    if bits > LONGEST_INT:
        raise SecurityError(f"it computes with numbers of more than {LONGEST_INT} bits")


def _check_text_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    budget = _budget.get()
    match name, args:
        case "replace", [str(old), str(new), *_]:
            budget.spend(len(text) + text.count(old) * len(new))
        case "join", [items]:
            budget.spend_on_joining(items, text)
        case (("ljust" | "rjust" | "center" | "zfill"), [int(width), *_]):
            budget.spend(width)
        case (("replace" | "join" | "ljust" | "rjust" | "center" | "zfill"), _):
            raise SecurityError(f"the method {name} of text cannot be called like this")


def _check_members(owner: Any, args: tuple[Any, ...]) -> None:
    """Charge the arguments of a list's or dictionary's method, which compares them with members or hashes them."""
    if isinstance(owner, list | tuple):
        _weighed(owner)
    for value in args:
        _weighed(value)


def _made(value: Any) -> Any:
    """Charge a value after its creation, and return it; it is no larger than its operands."""
    if isinstance(value, str | list | tuple | dict):
        _budget.get().spend(len(value))
    return value


# -------------------------------------------------------------------------------------------------------- the sandbox


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that `transformers` provides to templates, without the parts that no template uses."""

    intercepted_binops = frozenset({"*", "**", "+", "-", "%", "/", "//"})

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        copying = {name: _accounted(self.filters[name]) for name in _COPYING_FILTERS}
        reading = {name: _accounted(_weighing(self.filters[name])) for name in _READING_FILTERS}
        self.filters = {name: self.filters[name] for name in _FILTERS} | copying | reading | _OWN_FILTERS
        tests: dict[str, Any] = dict(self.tests)
        self.tests = tests | {name: _weighing(tests[name]) for name in _READING_TESTS}
        self.globals = {
            "range": self.globals["range"],  # Jinja's range, limited to 100,000 numbers
            "dict": _SafeDict(),
            "namespace": _SafeNamespace,
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "raise_exception": _raise_exception,
            "strftime_now": lambda pattern: _strftime(now(), pattern),
        }

    # Not named `compile`, because Jinja has a method of that name with another meaning.
    def load(self, name: str, source: str) -> jinja2.Template:
        """Compile a template, with budget checks added; run it with `render`."""
        try:
            tree = self.parse(source)
            _meter(tree)
            return self.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise BrokenCheckpoint(f"chat template {name!r}, line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise BrokenCheckpoint(f"chat template {name!r} is nested too deep") from error
        except (jinja2.TemplateError, SyntaxError, ValueError, MemoryError) as error:
            raise BrokenCheckpoint(f"chat template {name!r} cannot be compiled: {error}") from error

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (Jinja's signature)
        _budget.get().tick()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_text_method(owner, __obj.__name__, args)
        elif isinstance(owner, list | tuple | dict) or __obj is _SafeNamespace or isinstance(__obj, _SafeDict):
            _check_members(owner, args)
        result = super().call(__context, __obj, *args, **kwargs)
        hands_on = owner is __self or (isinstance(owner, dict) and __obj.__name__ == "get")
        return result if hands_on else _made(result)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in _TEXT_METHODS
        # Numbers have no attribute that a template needs, but they have `to_bytes`, which can create large values.
        return not isinstance(obj, int | float) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        if super().wrap_str_format(value) is not None:
            raise SecurityError("the method format of text is not allowed; use ~ or a filter")

    def tick(self) -> None:
        """Do nothing. `_meter` inserts calls of this method into loops, and `call` above checks the time limit."""

    def shown(self, value: Any) -> Any:
        """Charge a value that is converted to text. `_meter` inserts the calls into templates."""
        _budget.get().spend_on_text_of(value)
        return value

    def weighed(self, value: Any) -> Any:
        """Charge a value that is compared or looked up. `_meter` inserts the calls into templates."""
        return _weighed(value)

    def sliced(self, value: Any) -> Any:
        """Charge the result of a slice. `_meter` inserts the calls into templates."""
        return _made(value)


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeDict:
    """The function `dict(...)` for templates, without the attributes of the type `dict`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _SafeNamespace(Namespace):
    """A namespace that rejects names that begin with an underscore, and whose repr does not show its content."""

    def __repr__(self) -> str:
        return "<Namespace>"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _refuse_private(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


# ruff: noqa: SIM905 (eighty quoted words would be harder to read)

# Jinja filters that are available unchanged, because they return numbers or their input.
_FILTERS = """
    abs attr count d default first float items last length map reject rejectattr round select selectattr
""".split()

# Filters that create a value about as large as their input.
_COPYING_FILTERS = "list reverse".split()

# Filters that read their whole input, to compare its members or to convert it to text.
_READING_FILTERS = """
    capitalize dictsort e escape groupby lower max min safe sort title trim unique upper wordcount
""".split()
_READING_TESTS = """
    == eq equalto != ne > gt greaterthan >= ge < lt lessthan <= le in lower upper
""".split()

# Allowed methods of text. `encode` is missing, because the budget does not cover bytes. Methods that can expand a
# small input are checked.
_TEXT_METHODS = frozenset(
    """
    capitalize casefold center count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower
    isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace
    rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill
    """.split()
)


def _accounted(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # copies the attributes from which Jinja sees which arguments to pass
    def accounted(*args: Any, **kwargs: Any) -> Any:
        return _made(function(*args, **kwargs))

    return accounted


def _weighing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with its arguments charged to the budget. Iterators are turned into lists first."""

    @wraps(function)
    def weighing(*args: Any, **kwargs: Any) -> Any:
        whole = [list(_ticking(value)) if isinstance(value, Iterator) else value for value in args]
        for value in whole:
            _weighed(value)
        return function(*whole, **kwargs)

    return weighing


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(_string(message))


def _strftime(now: datetime, pattern: str) -> str:
    if len(pattern) > LONGEST_PATTERN:
        raise SecurityError(f"a date format of {len(pattern)} characters is too long")
    return now.strftime(pattern)


def _int(value: Any, default: int = 0, base: int = 10) -> int:
    if isinstance(value, str) and len(value) > LONGEST_INT // 8:
        raise SecurityError("the text of a number is too long")
    return int(do_int(value, default, base))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`, without the HTML escapes of Jinja's own filter, because a prompt is not HTML."""
    wide = max(map(len, separators or ("",))) if indent is None else indent
    if wide > 16:
        raise SecurityError(f"JSON with {wide} characters between its values is too wide")
    budget = _budget.get()
    budget.spend_on_text_of(value)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # Deeply nested JSON is mostly indentation, which the text length of the value does not include.
    return encoder.encode(value) if indent is None else budget.collect(encoder.iterencode(value))


@jinja2.pass_eval_context
def _join(context: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    items, separator = list(_ticking(value)), _string(d)
    _budget.get().spend_on_joining(items, separator)
    return str(do_join(context, items, separator, attribute))


@jinja2.pass_eval_context
def _replace(context: nodes.EvalContext, s: Any, old: str, new: str, count: int | None = None) -> str:
    text = _string(s)
    _budget.get().spend(len(text) + text.count(old) * len(new))
    return do_replace(context, text, old, new, count)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, int) else len(width)
    _budget.get().spend(len(s) + (s.count("\n") + 1) * margin)
    return str(do_indent(s, width, first, blank))


def _string(value: Any) -> str:
    _budget.get().spend_on_text_of(value)
    return str(value)


@jinja2.pass_environment
def _sum(environment: jinja2.Environment, iterable: Iterable[Any], attribute: str | int | None = None) -> Any:
    """The filter `sum`, for numbers only. Jinja's own filter also adds lists, with quadratic copying."""
    return sync_do_sum(environment, _ticking(iterable), attribute)


def _ticking(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _budget.get().tick()
        yield item


_OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "int": _int,
    "tojson": _tojson,
    "join": _join,
    "replace": _replace,
    "indent": _indent,
    "string": _string,
    "sum": _sum,
}


def _meter(tree: nodes.Template) -> None:
    """Add budget checks: of the time in every loop iteration and macro call, and of all values that become text."""
    repeats: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
    for repeated in repeats:
        repeated.body.insert(0, nodes.ExprStmt(_call("tick", []), lineno=repeated.lineno))
    _Readings().visit(tree)
    texts: list[Any] = list(tree.find_all((nodes.Output, nodes.Concat)))
    for text in texts:
        text.nodes = [part if isinstance(part, nodes.TemplateData) else _call("shown", [part]) for part in text.nodes]


class _Readings(NodeTransformer):
    """Adds budget checks to slices, comparisons and keys, which Jinja compiles to plain Python operations."""

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802 (Jinja's name)
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _call("sliced", [node])
        node.arg = _weigh(node.arg)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        # A comparison with a constant, usually a role, is cheap and not charged.
        if sum(not isinstance(operand, nodes.Const) for operand in operands) > 1:
            node.expr = _weigh(node.expr)
            for operand in node.ops:
                operand.expr = _weigh(operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.key = _weigh(node.key)
        return node


def _weigh(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _call("weighed", [node])


def _call(method: str, args: list[nodes.Expr]) -> nodes.Call:
    """Return the node that calls a method of the sandbox, which a template itself cannot name."""
    return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)
