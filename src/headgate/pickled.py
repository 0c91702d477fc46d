"""Plain values in another system's pickle, read opcode by opcode. Nothing is unpickled.

Some trainers send an NCCL id or CUDA handles inside a pickle. The values in it are numbers, texts and bytes; they are read
here by a small stack machine that imports no module, calls no function and creates no object of a class. What a pickle
would import or call becomes a `Name` or a `Call`, which only the caller interprets. A name or an opcode that is not on the
list is refused by its name.

Values may be shared or contain themselves, so a caller must follow the structure that it expects, and never compare,
print or traverse a whole value.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickletools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

LONGEST = 64 * 2**20  # bytes


class NotPlain(ValueError):
    """The pickle is malformed, or has something other than plain values and the names that are allowed."""


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """A class, function or constant that unpickling would import."""

    text: str  # module and name, with a dot between them


@dataclass(slots=True, eq=False)
class Call:
    """A call that unpickling would make. `state` is what it would set on the result."""

    function: str
    arguments: tuple[Any, ...]
    state: Any = None


class _Mark:
    pass


MARK: Final = _Mark()


def read_pickle(data: bytes, names: Collection[str], longest: int = LONGEST) -> Any:
    """The value in `data`. `names`: the only names that it may have. Raises NotPlain."""
    if len(data) > longest:
        raise NotPlain(f"the pickle has {len(data)} bytes; at most {longest} are read")
    machine, file = StackMachine(names), io.BytesIO(data)
    try:
        for name, argument in opcodes(file):
            machine.run(name, argument)
    except NotPlain:
        raise
    except (ValueError, OverflowError) as error:
        raise NotPlain(f"the pickle is malformed: {error!s:.200}") from error
    return machine.result()


def opcodes(file: io.BytesIO) -> Iterator[tuple[str, Any]]:
    """The opcodes up to the end, with their arguments. The argument of an opcode that is not listed is not parsed."""
    while (name := name_of(file.read(1))) != "STOP":
        if name not in READ:
            raise NotPlain(f"the pickle has the opcode {name}, which is not read")
        argument = OPCODES[name].arg
        yield name, None if argument is None else argument.reader(file)


def name_of(code: bytes) -> str:
    if not code:
        raise NotPlain("the pickle has no end")
    return NAMES.get(code.decode("latin-1"), f"{code[0]:#04x}")


def decode_base64(text: str) -> bytes:
    """The bytes of `text`. Raises NotPlain."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise NotPlain(f"the text is not base64: {error}") from error


class StackMachine:
    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, opcode: str, argument: Any) -> None:
        if opcode in LITERALS:
            self._stack.append(argument)
        elif opcode in CONSTANTS:
            self._stack.append(CONSTANTS[opcode]())
        elif opcode in OPERATIONS:
            OPERATIONS[opcode](self, argument)

    def result(self) -> Any:
        value = self._pop()
        if self._stack:
            raise NotPlain("the pickle has more than one value")
        return value

    def _pop(self, kind: type | tuple[type, ...] = object) -> Any:
        return of_kind(self._stack.pop() if self._stack else MARK, kind)

    def _top(self, kind: type) -> Any:
        return of_kind(self._stack[-1] if self._stack else MARK, kind)

    def _to_mark(self) -> list[Any]:
        """The values above the last mark, which are removed with it."""
        for at in reversed(range(len(self._stack))):
            if self._stack[at] is MARK:
                values = self._stack[at + 1 :]
                del self._stack[at:]
                return values
        raise NotPlain("the pickle is malformed: a mark is missing")

    def mark(self, _: Any) -> None:
        self._stack.append(MARK)

    def put(self, index: int) -> None:
        self._memo[index] = self._top(object)

    def memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._top(object)

    def get(self, index: int) -> None:
        if index not in self._memo:
            raise NotPlain(f"the pickle is malformed: there is no entry {index}")
        self._stack.append(self._memo[index])

    def tuple_of(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._stack.append(tuple(values[::-1]))

    def tuple_to_mark(self, _: Any) -> None:
        self._stack.append(tuple(self._to_mark()))

    def append(self, _: Any) -> None:
        value = self._pop()
        self._top(list).append(value)

    def appends(self, _: Any) -> None:
        values = self._to_mark()
        self._top(list).extend(values)

    def set_item(self, _: Any) -> None:
        value, key = self._pop(), self._pop()
        self._top(dict)[of_kind(key, (str, int))] = value

    def set_items(self, _: Any) -> None:
        values = self._to_mark()
        if len(values) % 2:
            raise NotPlain("the pickle is malformed: a key has no value")
        keys = [of_kind(key, (str, int)) for key in values[::2]]
        self._top(dict).update(zip(keys, values[1::2], strict=True))

    def name(self, _: Any) -> None:
        name, module = self._pop(str), self._pop(str)
        if (text := f"{module}.{name}") not in self._names:
            raise NotPlain(f"the pickle names {text:.200}, which is not allowed")
        self._stack.append(Name(text))

    def call(self, _: Any) -> None:
        arguments, function = self._pop(tuple), self._pop(Name)
        self._stack.append(Call(function.text, arguments))

    def build(self, _: Any) -> None:
        state = self._pop()
        self._top(Call).state = state


def of_kind(value: Any, kind: type | tuple[type, ...]) -> Any:
    if value is MARK:
        raise NotPlain("the pickle is malformed: a value is missing")
    if not isinstance(value, kind):
        raise NotPlain(f"the pickle is malformed: a {type(value).__name__} is in the wrong place")
    return value


def _tuple_of(count: int) -> Callable[[StackMachine, Any], None]:
    return lambda machine, _: machine.tuple_of(count)


LITERALS = frozenset(
    {
        *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
    }
)
CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
OPERATIONS: dict[str, Callable[[StackMachine, Any], None]] = {
    "MARK": StackMachine.mark,
    "BINPUT": StackMachine.put,
    "LONG_BINPUT": StackMachine.put,
    "MEMOIZE": StackMachine.memoize,
    "BINGET": StackMachine.get,
    "LONG_BINGET": StackMachine.get,
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "TUPLE": StackMachine.tuple_to_mark,
    "APPEND": StackMachine.append,
    "APPENDS": StackMachine.appends,
    "SETITEM": StackMachine.set_item,
    "SETITEMS": StackMachine.set_items,
    "STACK_GLOBAL": StackMachine.name,
    "REDUCE": StackMachine.call,
    "NEWOBJ": StackMachine.call,
    "BUILD": StackMachine.build,
}
READ = LITERALS | CONSTANTS.keys() | OPERATIONS.keys() | {"PROTO", "FRAME"}
OPCODES = {opcode.name: opcode for opcode in pickletools.opcodes}
NAMES = {opcode.code: opcode.name for opcode in pickletools.opcodes}
