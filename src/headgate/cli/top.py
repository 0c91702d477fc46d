"""`headgate top`: the live state of a server or a fleet, in a terminal."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING

from headgate.cli.serve import checked_key
from headgate.cli.tls import add_url_ca, url_tls
from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from headgate.dashboard.frame import Frame, MemberView, Point, RequestView
    from headgate.httpclient import HttpAddress

SILENT_S = 6.0  # frames arrive every second; after this long the server is considered unreachable
RETRY_S = 1.0

Line = list[tuple[str, str]]  # pieces of text, each with its colour

PLAIN, BOLD, DIM = "", "1", "2"
GREEN, YELLOW, MAGENTA, RED = "32", "33", "35", "31"
COLOURS = {
    **dict.fromkeys(("running", "ready", "decode"), GREEN),
    **dict.fromkeys(("pausing", "paused", "starting", "outdated", "prefill"), YELLOW),
    **dict.fromkeys(("updating", "draining", "stopping", "transfer", "moving"), MAGENTA),
    **dict.fromkeys(("down", "wedged", "quarantined"), RED),
}
SPARKS = "▁▂▃▄▅▆▇█"


class Unreachable(HeadgateError):
    pass


def add_top(command: argparse.ArgumentParser) -> None:
    command.usage = "headgate top [URL] [options]"
    command.set_defaults(run=top)
    add = command.add_argument
    add("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="server or router (%(default)s)")
    add("--once", action="store_true", help="print one frame and exit")
    add("--api-key", metavar="KEY", help="API or admin key; default: $HEADGATE_ADMIN_KEY")
    add_url_ca(add)


def top(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.httpclient import HttpAddress

    key = options.api_key or checked_key(environ.get("HEADGATE_ADMIN_KEY"), "HEADGATE_ADMIN_KEY")
    address = HttpAddress.of(options.url, url_tls(options))
    if options.once or not sys.stdout.isatty():
        asyncio.run(_print(address, key, options.url, once=options.once))
    else:
        with _screen() as show:
            asyncio.run(_live(address, key, options.url, show))
    return 0


# --------------------------------------------------------------------------------------------------------- the stream


async def _print(address: HttpAddress, key: str | None, url: str, *, once: bool) -> None:
    """Print frames as text, for a pipe. With `once`, print only the first frame that has rates."""
    history: deque[Point] = deque(maxlen=240)
    async with aclosing(frames(address, key)) as coming:
        async for frame in coming:
            _remember(frame, history)
            if once and frame.now is None:
                continue
            width, height = shutil.get_terminal_size((100, 40))
            print("\n".join(plain(line) for line in render(frame, history, url, width, height)), flush=True)
            if once:
                return
            print()
    raise Unreachable(f"{url} has ended the stream")


async def _live(address: HttpAddress, key: str | None, url: str, show: Callable[[list[Line]], None]) -> None:
    """Show frames until q is pressed; reconnect when the connection is lost."""
    task, loop, keyboard = asyncio.current_task(), asyncio.get_running_loop(), sys.stdin.fileno()
    assert task is not None

    def pressed() -> None:
        if os.read(keyboard, 1).lower() in (b"q", b""):
            task.cancel()

    loop.add_reader(keyboard, pressed)
    try:
        while True:
            await _follow(address, key, url, show)
            await asyncio.sleep(RETRY_S)
    except asyncio.CancelledError:
        return
    finally:
        loop.remove_reader(keyboard)


async def _follow(address: HttpAddress, key: str | None, url: str, show: Callable[[list[Line]], None]) -> None:
    history: deque[Point] = deque(maxlen=240)
    try:
        async with aclosing(frames(address, key)) as coming:
            async for frame in coming:
                _remember(frame, history)
                show(render(frame, history, url, *shutil.get_terminal_size()))
    except Unreachable as error:
        show([[("headgate", BOLD), (f"  {error}", RED)], [("trying again; q quits", DIM)]])


def _remember(frame: Frame, history: deque[Point]) -> None:
    if frame.history is not None:
        history.extend(frame.history)
    elif frame.now is not None:
        history.append(frame.now)


async def frames(address: HttpAddress, key: str | None) -> AsyncGenerator[Frame]:
    """Yield the frames of the server's event stream. Raises Unreachable when the connection fails."""
    from headgate.httpclient import HttpFailure
    from headgate.tls import why

    where = f"{address.host}:{address.port}"
    try:
        async with aclosing(_frames(address, key, where)) as coming:
            while True:
                async with asyncio.timeout(SILENT_S):
                    frame = await anext(coming, None)
                if frame is None:
                    return
                yield frame
    except TimeoutError:
        raise Unreachable(f"{where} has sent nothing for {SILENT_S:g} s") from None
    except (OSError, EOFError, HttpFailure) as error:
        raise Unreachable(f"{where} cannot be reached: {why(error)}") from None


async def _frames(address: HttpAddress, key: str | None, where: str) -> AsyncGenerator[Frame]:
    import msgspec

    from headgate.dashboard.frame import Frame
    from headgate.dashboard.page import EVENTS
    from headgate.httpclient import call

    decode = msgspec.json.Decoder(Frame).decode
    async with call(address, "GET", EVENTS, api_key=key) as answer:
        if answer.status != 200:
            raise Unreachable(f"{where} answered {answer.status}: {_reason(await answer.body())}")
        async for line in answer.lines():
            if line.startswith(b"data: "):
                try:
                    yield decode(line[6:])
                except msgspec.MsgspecError as error:
                    raise Unreachable(f"{where} sends frames that this version cannot read: {error}") from None


def _reason(body: bytes) -> str:
    import msgspec

    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return "it has no dashboard"


# ------------------------------------------------------------------------------------------------------------ rendering


def render(frame: Frame, history: deque[Point], url: str, width: int, height: int) -> list[Line]:
    lines = [_head(frame, url), *_rates(frame, history), []]
    lines += _table(MEMBER_TITLES, [_member(member) for member in frame.cards])
    lines.append([])
    if not frame.sees_requests:
        lines.append([("requests are shown only with a key (--api-key)", DIM)])
    elif not frame.requests:
        lines.append([("no requests are in flight", DIM)])
    else:
        room = max(height - len(lines) - 2, 3)
        names = {member.id: member.name for member in frame.cards}
        lines += _table(REQUEST_TITLES, [_request(request, names) for request in frame.requests[:room]])
        if frame.total > room:
            lines.append([(f"and {frame.total - room} more", DIM)])
    return [_fitted(line, width) for line in lines[:height]]


def _head(frame: Frame, url: str) -> Line:
    viewer = "admin" if frame.admin else frame.tenant or "no key"
    text = f"{frame.model or 'no model'} · {frame.kind} {frame.version} · {viewer}"
    return [("headgate ", BOLD), (frame.state, COLOURS.get(frame.state, DIM)), (f"  {text}  ", PLAIN), (url, DIM)]


def _rates(frame: Frame, history: deque[Point]) -> Iterator[Line]:
    now = frame.now
    if now is None:
        yield [("measuring ...", DIM)]
        return
    figures = [
        ("tokens/s", f"{now.tokens_s:,.0f}"),
        ("requests/s", f"{now.requests_s:.1f}"),
        ("first token p50/p99", f"{_seconds(now.first_token_p50)} / {_seconds(now.first_token_p99)}"),
        ("between tokens", f"{_seconds(now.between_tokens_p50)} / {_seconds(now.between_tokens_p99)}"),
        ("cache hits", "-" if now.hit_rate is None else f"{now.hit_rate:.0%}"),
    ]
    yield [piece for name, value in figures for piece in ((f"{name} ", DIM), (f"{value}   ", BOLD))]
    yield [("tokens/s ", DIM), (sparkline([point.tokens_s for point in history][-60:]), GREEN)]
    yield [(_ends(history), DIM)]


def _ends(history: deque[Point]) -> str:
    """Format the numbers of retries, resumes and aborts over the recorded history."""
    causes: dict[str, int] = {}
    for point in history:
        for cause, count in point.aborts.items():
            causes[cause] = causes.get(cause, 0) + count
    aborts = ", ".join(f"{cause.replace('_', ' ')} {count}" for cause, count in sorted(causes.items())) or "none"
    retries, resumes = sum(point.retries for point in history), sum(point.resumes for point in history)
    return f"last {len(history)} s: {retries} retries, {resumes} resumes; aborts: {aborts}"


def sparkline(values: list[float]) -> str:
    most = max(values, default=0.0) or 1.0
    return "".join(SPARKS[min(int(value / most * len(SPARKS)), len(SPARKS) - 1)] for value in values)


MEMBER_TITLES = ("WORKER", "STATE", "ROLE", ">RUN", ">WAIT", ">TOKENS/S", ">WEIGHTS", "KV BLOCKS")
REQUEST_TITLES = ("REQUEST", "PHASE", ">AGE", ">TOKENS", "WORKER", "TENANT")


def _member(member: MemberView) -> tuple[str, ...]:
    return (
        *(member.name, member.state, member.role or "-", str(member.running), str(member.waiting)),
        "-" if member.tokens_s is None else f"{member.tokens_s:,.0f}",
        "-" if member.version is None else f"v{member.version}",
        _blocks(member),
    )


def _blocks(member: MemberView, width: int = 20) -> str:
    if not member.total:
        return "-"
    held, cached = (round(width * blocks / member.total) for blocks in (member.held, member.cached))
    cached = min(cached, width - held)
    bar = "█" * held + "▒" * cached + "·" * (width - held - cached)
    return f"{bar} {member.held:,} held, {member.cached:,} cached of {member.total:,}"


def _request(request: RequestView, names: Mapping[str, str]) -> tuple[str, ...]:
    worker = "-" if request.worker is None else names.get(request.worker, request.worker)
    return (
        *(_printable(request.id), request.phase, _seconds(request.age_s)),
        *(f"{request.tokens:,}", worker, _printable(request.tenant) or "-"),
    )


def _printable(text: str) -> str:
    """Replace control characters in a name chosen by a client, because they could move the cursor."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.1f} ms" if value < 0.01 else f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


def _table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[Line]:
    """Yield rows padded to the width of each column; a title that begins with > marks a right-aligned column."""
    names = [title.lstrip(">") for title in titles]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    for row in (tuple(names), *rows):
        line: Line = []
        for title, width, text in zip(titles, widths, row, strict=True):
            padded = text.rjust(width) if title.startswith(">") else text.ljust(width)
            line.append((f"{padded}  ", DIM if row == tuple(names) else COLOURS.get(text, PLAIN)))
        yield line


def _fitted(line: Line, width: int) -> Line:
    fitted: Line = []
    for text, colour in line:
        if width > 0:
            fitted.append((text[:width], colour))
            width -= len(text)
    return fitted


def plain(line: Line) -> str:
    return "".join(text for text, _ in line).rstrip()


def coloured(line: Line) -> str:
    return "".join(f"\x1b[{colour}m{text}\x1b[0m" if colour else text for text, colour in line)


@contextmanager
def _screen() -> Iterator[Callable[[list[Line]], None]]:
    """Use the terminal's alternate screen, and restore the terminal afterwards."""
    import termios
    import tty

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard) if sys.stdin.isatty() else None

    def show(lines: list[Line]) -> None:
        sys.stdout.write("\x1b[H" + "".join(f"{coloured(line)}\x1b[K\r\n" for line in lines[:-1]))
        sys.stdout.write("".join(f"{coloured(line)}\x1b[K" for line in lines[-1:]) + "\x1b[J")
        sys.stdout.flush()

    sys.stdout.write("\x1b[?1049h\x1b[?25l")
    try:
        if before is not None:
            tty.setcbreak(keyboard)
        yield show
    finally:
        if before is not None:
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
