"""Fast parsing and copying for the common forms of requests and answers, in Python or in C.

For input of another form, these functions return None, and the caller uses the general code. A `FastPath` holds the
functions. There are two: `PYTHON`, and `compiled()` with the same functions in C (`fast_path.c`). A router process
chooses one at start-up and passes it to `Router`. They differ in speed and in how keys are computed, which only the
prefix index sees. C also does not check that the parts of a body that it skips are JSON; the worker rejects such a
body.
"""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
from asyncio import WriteTransport
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from headgate import compiling
from headgate.compiling import (
    PREBUILT,
    PYTHON_ABI,
    NotCompiled,
    build_once,
    compile_with,
    fingerprint,
    import_library,
    load_prebuilt,
)
from headgate.contract.journal import (
    DATA,
    DONE,
    FAILURE,
    MESSAGE_STOP,
    PLAIN_FINISH,
    PLAIN_PROMPT,
    PLAIN_TOKENS,
    are_plain,
)
from headgate.router.data_path.outbox import Outbox
from headgate.router.exchange.journal import Journal

T = TypeVar("T")

MODULE: Final = "_headgate_fast_path"
FILE: Final = f"{MODULE}.so"
SOURCE: Final = Path(__file__).with_name("fast_path.c")
COMPILE_S: Final = 60.0
FLAGS: Final = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden")

LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: (\d{1,12})(?=\r\n)")
CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,8})\r\n")
ID: Final = b"\r\nx-request-id: "
# The start of another message. It cannot match inside a text, where the quotes would be escaped.
NEXT = re.compile(rb'\s*,\s*\{\s*"(?:role|content)"')
LAST_CHUNK: Final = b"0\r\n\r\n"


def request(data: bytes, heads: Mapping[bytes, T], most: int) -> tuple[T, bytes] | None:
    """Split `data`, one whole request, into its entry in `heads` and its body.

    None if the head, without the length, is not in `heads`, or if the body has more than `most` bytes.
    """
    key = request_head(data)
    head = None if key is None else heads.get(key)
    if head is None:
        return None
    body = data[data.find(b"\r\n\r\n") + 4 :]
    return (head, body) if len(body) <= most else None


def request_head(data: bytes) -> bytes | None:
    """Return the key in `heads` for this request's head; None if `data` is not exactly one whole request."""
    end = data.find(b"\r\n\r\n") + 2
    length = LENGTH.search(data, 0, end)
    if length is None or len(data) != end + 2 + int(length[1]):
        return None
    return data[: length.start()] + data[length.end() : end]


def answer(data: bytes, heads: Mapping[bytes, T]) -> tuple[T, bytes] | None:
    """Split `data`, one whole answer of events in chunks, into its entry in `heads` and its events.

    None if the head, without the request id, is not in `heads`, or if the answer has another form.
    """
    end = data.find(b"\r\n\r\n")
    if end < 0 or not data.endswith(LAST_CHUNK) or len(data) < end + 9:
        return None
    head = heads.get(answer_head(data, end))
    body = None if head is None else _unchunked(data, end + 4, len(data) - len(LAST_CHUNK))
    return None if head is None or body is None or not are_plain(body) else (head, body)


def answer_head(data: bytes, end: int) -> bytes:
    """Return the head of an answer without the line that differs in every answer."""
    start = data.find(ID, 0, end)
    return data[:end] if start < 0 else data[:start] + data[data.find(b"\r\n", start + 2, end + 2) : end]


def _unchunked(data: bytes, start: int, end: int) -> bytes | None:
    parts = []
    while start < end:
        line = CHUNK_SIZE.match(data, start, end)
        if line is None:
            return None
        start = line.end() + int(line[1], 16) + 2
        parts.append(data[line.end() : start - 2])
        if not parts[-1] or start > end or data[start - 2 : start] != b"\r\n":
            return None
    return b"".join(parts) or None


def read_whole(events: bytes) -> tuple[int, int, int, bytes] | None:
    """Read a journal with one choice, followed by the whole answer.

    Returns the weights version of the first token, the number of prompt tokens, the number of cached prompt tokens,
    and the answer. `Journal` and `whole_answer` read the same data in any form.
    """
    version: re.Match[bytes] | None = None
    finish: re.Match[bytes] | None = None
    answer: bytes | None = None
    for line in events[:-1].split(b"\n"):
        if not line:
            continue
        if tokens := PLAIN_TOKENS.fullmatch(line):
            version = version or tokens
        elif finish is None and (finished := PLAIN_FINISH.fullmatch(line)):
            finish = finished
        elif PLAIN_PROMPT.fullmatch(line):
            continue
        elif answer is None and line.startswith(DATA):
            answer = line[len(DATA) :]
        else:
            return None
    if version is None or finish is None or answer is None or not events.endswith(b"\n\n"):
        return None
    return int(version[1]), int(finish[1]), int(finish[2]), answer


class PythonPipe:
    """The `EventPipe` of `PYTHON`.

    Events are written at once, unless other bytes for the same client wait for the end of the event loop's turn: for
    a single chunk, waiting costs more than it saves.
    """

    __slots__ = ("_feed", "_outbox", "_transport", "heard")

    def __init__(self, journal: Journal, outbox: Outbox, transport: WriteTransport) -> None:
        self._feed = journal.feed
        self._outbox = outbox
        self._transport = transport
        self.heard = False

    def take(self, data: bytes) -> bool:
        line = CHUNK_SIZE.match(data)
        if line is None or len(data) != line.end() + int(line[1], 16) + 2 or data[-2:] != b"\r\n":
            return False
        events = data[line.end() : -2]
        if not are_plain(events) or DONE in events or MESSAGE_STOP in events or FAILURE in events:
            return False
        self._feed(events)
        if self._transport in self._outbox.writes:
            self._outbox.write(self._transport, data)
        elif not self._transport.is_closing():
            self._transport.write(data)
        self.heard = True
        return True


def peek(body: bytes) -> tuple[str | None, bool, bytes, bool, int] | None:
    """Return (model, stream, prompt, chat, tokens), as in `RequestInfo`; None if the body has unusual fields.

    This version always returns None: only in C is this faster than decoding the body.
    """
    return None


def cut_keys(root: int, prompt: bytes, size: int, cuts: tuple[int, ...]) -> list[int]:
    """Return the keys of the prompt's prefixes that end at `cuts`, up to `size`."""
    key, start, keys = root, 0, []
    for end in cuts:
        if end > size:
            break
        key = hash((key, prompt[start:end]))
        keys.append(key)
        start = end
    return keys


def tail_key(key: int, prompt: bytes, start: int, end: int) -> int:
    """Return the key of a prompt that ends at `end`; `key` is the key of its bytes up to `start`."""
    return hash((key, prompt[start:end], None))


def message_end(prompt: bytes, before: int) -> int:
    """Return where the last message but one ends; 0 if there is none."""
    brace = prompt.rfind(b"}", 0, before)  # a search for one character is many times faster than for two
    if brace < 0 or NEXT.match(prompt, brace + 1):
        return brace + 1
    # This brace is inside a text. The message starts at its key "role", which would be escaped inside a text.
    return prompt.rfind(b"}", 0, max(prompt.rfind(b'"role"', 0, brace), 0)) + 1


def runs(young: dict[int, T], old: dict[int, T], keys: list[int]) -> list[tuple[T, int]]:
    """Return the values of the leading keys in the table; a run of equal values is one entry, with its last key."""
    found: list[tuple[T, int]] = []
    for depth, key in enumerate(keys, 1):
        node = young.get(key)
        if node is None and (node := old.get(key)) is None:
            break
        if found and found[-1][0] is node:
            found.pop()
        found.append((node, depth))
    return found


def renew(
    young: dict[int, tuple[T, ...]],
    old: dict[int, tuple[T, ...]],
    keys: list[int],
    renewed: Callable[[tuple[T, ...]], tuple[T, ...]],
) -> None:
    """Move the values of `keys` from `old` to `young`; `renewed` converts them, once per run of equal values."""
    run, fresh = None, ()  # type: tuple[T, ...] | None, tuple[T, ...]
    for key in keys:
        node = young.get(key)
        if node is None:
            node = old.pop(key, ())
        if node is not run:
            run, fresh = node, renewed(node)
        young[key] = fresh


# ------------------------------------------------------------------------------------------------ which functions to use


class ReadRequest(Protocol):
    def __call__(self, data: bytes, heads: Mapping[bytes, T], most: int, /) -> tuple[T, bytes] | None: ...


class ReadAnswer(Protocol):
    def __call__(self, data: bytes, heads: Mapping[bytes, T], /) -> tuple[T, bytes] | None: ...


class EventPipe(Protocol):
    """Sends events from a worker's connection straight to a client's, and records them in the journal.

    It does not take errors, nor the end of an answer.
    """

    heard: bool  # whether an event has passed since this was last set to False

    def take(self, data: bytes, /) -> bool:
        """Send `data` to the client if it is one chunk of whole events, without an error or the end of the answer.

        Returns whether it was sent.
        """


class Runs(Protocol):
    def __call__(self, young: dict[int, T], old: dict[int, T], keys: list[int], /) -> list[tuple[T, int]]: ...


class Renew(Protocol):
    def __call__(
        self,
        young: dict[int, tuple[T, ...]],
        old: dict[int, tuple[T, ...]],
        keys: list[int],
        renewed: Callable[[tuple[T, ...]], tuple[T, ...]],
        /,
    ) -> None: ...


OpenPipe = Callable[[Journal, Outbox, WriteTransport], EventPipe]
ReadWhole = Callable[[bytes], tuple[int, int, int, bytes] | None]
Peek = Callable[[bytes], tuple[str | None, bool, bytes, bool, int] | None]
CutKeys = Callable[[int, bytes, int, tuple[int, ...]], list[int]]
TailKey = Callable[[int, bytes, int, int], int]
MessageEnd = Callable[[bytes, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FastPath:
    """An implementation of each function. Keys differ between implementations, so an index always uses the same."""

    request: ReadRequest
    answer: ReadAnswer
    pipe: OpenPipe
    read_whole: ReadWhole
    peek: Peek
    cut_keys: CutKeys
    tail_key: TailKey
    message_end: MessageEnd
    runs: Runs
    renew: Renew


PYTHON: Final = FastPath(
    request=request,
    answer=answer,
    pipe=PythonPipe,
    read_whole=read_whole,
    peek=peek,
    cut_keys=cut_keys,
    tail_key=tail_key,
    message_end=message_end,
    runs=runs,
    renew=renew,
)


# -------------------------------------------------------------------------------------------------------- compiling C


def compiled(compiler: str = "cc", cache: Path | None = None) -> FastPath | NotCompiled:
    """Return the functions of `fast_path.c`; compile them unless the wheel or the cache has the library."""
    library = _load(compiler, cache)
    if isinstance(library, NotCompiled):
        return library
    return FastPath(
        request=library.request,
        answer=library.answer,
        pipe=library.Pipe,
        read_whole=library.read_whole,
        peek=library.peek,
        cut_keys=library.cut_keys,
        tail_key=library.tail_key,
        message_end=library.message_end,
        runs=library.runs,
        renew=library.renew,
    )


def default_cache() -> Path:
    return compiling.default_cache() / "router"


def library_in(cache: Path) -> Path:
    """Return the path of the compiled library, whether it exists or not."""
    return cache / fingerprint([SOURCE], FLAGS, sys.version, sysconfig.get_platform()) / FILE


def prebuilt_in(folder: Path) -> Path:
    """Return the path of the library in a wheel's folder, whether it exists or not."""
    return folder / fingerprint([SOURCE], FLAGS, PYTHON_ABI, sysconfig.get_platform()) / FILE


def found_library() -> Path:
    """Return the path of the library that is loaded, whether it exists or not."""
    prebuilt = prebuilt_in(PREBUILT)
    return prebuilt if prebuilt.exists() else library_in(default_cache())


def _load(compiler: str, cache: Path | None) -> Any:
    """Return the extension module, or `NotCompiled`."""
    try:
        prebuilt = load_prebuilt(MODULE, prebuilt_in(PREBUILT))
        if prebuilt is not None:
            return prebuilt
        library = library_in(cache or default_cache())
        return build_once(library, partial(_build, compiler)) or import_library(MODULE, library)
    except (OSError, ImportError, RuntimeError) as error:  # RuntimeError: no home directory, hence no cache
        return NotCompiled(f"cannot build or load {MODULE}: {error}")


def _build(compiler: str, scratch: Path, library: Path) -> str | None:
    found = shutil.which(compiler)
    if found is None:
        return f"there is no compiler {compiler!r}"
    include = sysconfig.get_paths()["include"]
    command = [found, *FLAGS, f"-I{include}", str(SOURCE), "-o", str(library)]
    why = compile_with(command, timeout_s=COMPILE_S)
    return None if why is None else f"compiling {SOURCE.name} failed: {why}"
