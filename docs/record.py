"""Record a kill -9 in the middle of a stream, and draw it as an SVG that plays by itself: docs/images/kill.svg.

    python docs/record.py [MODEL] [--out docs/images/kill.svg]

The picture is a recording of a real run: a fleet of two servers (`headgate up`), one streamed chat, and SIGKILL for the
server that generates it. The times in the picture are the times at which the client received the text. The same request
is sent once more without a kill, and the recording is refused if the two answers differ.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import httpx

QUESTION = "Write a story about a lighthouse keeper and a storm."
BODY = {
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 160,
    "temperature": 0.7,
    "seed": 3,
    "ignore_eos": True,
    "stream": True,
}
KILL_AFTER = 65  # pieces of text
START_S = 120.0


@dataclass(frozen=True)
class Recording:
    """What the client of one stream received, in seconds after its request."""

    pieces: list[tuple[float, str]]
    killed_s: float = 0.0
    moved_s: float = 0.0  # when the router asked the second server
    pid: int = 0  # of the server that was killed
    workers: tuple[str, ...] = ()  # that generated the answer, in order

    @property
    def text(self) -> str:
        return "".join(piece for _, piece in self.pieces)

    @property
    def resumed(self) -> int:
        """The first piece of the second server."""
        return next(at for at, (second, _) in enumerate(self.pieces) if second >= self.moved_s)

    @property
    def gap_s(self) -> float:
        return self.pieces[self.resumed][0] - self.pieces[self.resumed - 1][0]


# ------------------------------------------------------------------------------------------------------------- the run


@contextmanager
def fleet(model: str | None) -> Iterator[str]:
    """Two servers and a router; yields the address of the router."""
    command = [sys.executable, "-m", "headgate.cli", "up", *([model] if model else []), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    overdue = threading.Timer(START_S, process.kill)
    overdue.start()
    try:
        assert process.stdout is not None
        found = next(filter(None, (re.search(r"listening +(http://\S+)", line) for line in process.stdout)), None)
        overdue.cancel()
        if found is None:
            raise SystemExit("headgate up did not become ready")
        threading.Thread(target=process.stdout.read, daemon=True).start()  # a full pipe would stop the fleet
        yield found[1]
    finally:
        overdue.cancel()
        process.terminate()
        process.wait(60)


def stream(http: httpx.Client, kill: bool) -> Recording:
    pieces: list[tuple[float, str]] = []
    killed: list[tuple[float, int]] = []
    began = time.monotonic()
    killer = threading.Thread(target=lambda: killed.append((kill_server(http), time.monotonic() - began)[::-1]))
    with http.stream("POST", "/v1/chat/completions", json=BODY) as response:
        response.raise_for_status()
        for event in events(response):
            piece = event["choices"][0]["delta"].get("content") if event.get("choices") else None
            if piece:
                pieces.append((time.monotonic() - began, piece))
            if kill and len(pieces) == KILL_AFTER and not killer.ident:
                killer.start()  # not here: the time of the next piece must be that of its arrival
    if not kill:
        return Recording(pieces)
    killer.join()
    stages = http.get(f"/v1/requests/{response.headers['X-Request-Id']}").json()["stages"]
    workers = tuple(stage["worker"] for stage in stages)
    return Recording(pieces, killed[0][0], stages[-1]["began_s"], killed[0][1], workers)


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(f"the stream ended with {event['error']}")
            yield event


def kill_server(http: httpx.Client) -> int:
    """Kill the server that has the request."""
    with httpx.Client(base_url=http.base_url, timeout=10, trust_env=False) as control:
        workers = control.get("/v1/workers").json()["workers"]
    pid: int = max(workers, key=lambda worker: worker["in_flight"])["pid"]
    os.kill(pid, signal.SIGKILL)
    return pid


def record(model: str | None) -> Recording:
    with fleet(model) as url, httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        stream(http, kill=False)  # the kernels are loaded, and the prompt is cached
        undisturbed = stream(http, kill=False)
        recording = stream(http, kill=True)
    if len(set(recording.workers)) != 2:
        raise SystemExit(f"the answer did not move: it was generated by {recording.workers}")
    if recording.text != undisturbed.text:
        raise SystemExit(f"the answers differ:\n{undisturbed.text}\n\n{recording.text}")
    return recording


# --------------------------------------------------------------------------------------------------------- the picture

COLUMNS, LINE, LEFT, TOP = 92, 19, 18, 78
WIDTH = 2 * LEFT + round(COLUMNS * 7.9)
HOLD_S = 4.0  # the finished picture stays before it starts again
SMOOTH_S = 0.05  # pieces that arrive within this time appear together

STYLE = """
.page{fill:#ffffff;stroke:#d0d7de}.text{fill:#57606a}.first{fill:#0969da}.second{fill:#1a7f37}.kill{fill:#cf222e}
text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre}
@media(prefers-color-scheme:dark){.page{fill:#0d1117;stroke:#30363d}.text{fill:#8b949e}.first{fill:#58a6ff}
.second{fill:#3fb950}.kill{fill:#ff7b72}}
"""


def draw(recording: Recording) -> str:
    """The recording as SVG. Without animation, it shows the end of the stream."""
    recording = from_zero(recording)
    resumed, end = recording.resumed, recording.pieces[-1][0]
    whole = end + HOLD_S
    lines = wrapped(recording)
    bottom = TOP + LINE * len(lines) + 10
    killed = f"$ kill -9 {recording.pid}"
    verdict = f"{len(recording.text)} characters, none missing, none repeated: the same text as without the kill"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 44}" role="img">',
        "<title>A stream continues on another server after kill -9</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" x=".5" y=".5" width="{WIDTH - 1}" height="{bottom + 43}" rx="8"/>',
        label(LEFT, 28, "text", "$ headgate up  # two servers, one address"),
        label(LEFT, 28 + LINE, "text", f"> {QUESTION}"),
    ]
    for number, line in enumerate(lines):
        spans = (
            f'<tspan class="{"first" if at < resumed else "second"}">{escape(text)}{appear(second, whole)}</tspan>'
            for at, second, text in line
        )
        parts.append(f'<text x="{LEFT}" y="{TOP + LINE * number}">{"".join(spans)}</text>')
    parts += [
        label(LEFT, bottom, "kill", killed, appear(recording.killed_s, whole)),
        label(
            LEFT + 170,
            bottom,
            "second",
            f"the other server continues, {1000 * recording.gap_s:.0f} ms after the last text",
            appear(recording.pieces[resumed][0], whole),
        ),
        label(LEFT, bottom + LINE + 4, "text", verdict, appear(end, whole)),
        "</svg>\n",
    ]
    return "\n".join(parts)


def from_zero(recording: Recording) -> Recording:
    """The first text appears after half a second, however long the prompt took."""
    late = recording.pieces[0][0] - 0.5
    return replace(
        recording,
        pieces=[(second - late, piece) for second, piece in recording.pieces],
        killed_s=recording.killed_s - late,
        moved_s=recording.moved_s - late,
    )


def label(x: int, y: int, kind: str, text: str, animation: str = "") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}{animation}</text>'


def appear(second: float, whole_s: float) -> str:
    """An element that is invisible until its time, again in every repetition."""
    return (
        f'<animate attributeName="fill-opacity" values="0;1" keyTimes="0;{second / whole_s:.4f}" '
        f'calcMode="discrete" dur="{whole_s:.2f}s" repeatCount="indefinite"/>'
    )


def wrapped(recording: Recording) -> list[list[tuple[int, float, str]]]:
    """The text in lines of words, as (first piece, time, text) of what appears together."""
    characters = [(at, second, letter) for at, (second, piece) in enumerate(recording.pieces) for letter in piece]
    lines: list[list[tuple[int, float, str]]] = [[]]
    for word in words(characters):
        if len(lines[-1]) + len(word) > COLUMNS:
            lines.append([])
        if word[0][2] == "\n":
            lines.append([])
        elif lines[-1] or word[0][2] != " ":
            lines[-1] += word
    return [runs(line, recording.resumed) for line in lines if line]


def words(characters: list[tuple[int, float, str]]) -> Iterator[list[tuple[int, float, str]]]:
    """Words, spaces and line breaks."""
    text = "".join(letter for _, _, letter in characters)
    for found in re.finditer(r"\n| +|[^\s]+", text):
        yield characters[found.start() : found.end()]


def runs(line: list[tuple[int, float, str]], resumed: int) -> list[tuple[int, float, str]]:
    """Merge what appears at about the same time and comes from the same server."""
    merged: list[tuple[int, float, str]] = []
    for at, second, letter in line:
        if merged and second - merged[-1][1] < SMOOTH_S and (at < resumed) == (merged[-1][0] < resumed):
            merged[-1] = (*merged[-1][:2], merged[-1][2] + letter)
        else:
            merged.append((at, second, letter))
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: the default model of headgate up")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images/kill.svg")
    arguments = parser.parse_args()
    recording = record(arguments.model)
    arguments.out.write_text(draw(recording), "utf-8")
    print(
        f"{len(recording.pieces)} pieces in {recording.pieces[-1][0]:.1f} s, from {' and '.join(recording.workers)};"
    )
    print(f"killed {recording.pid} after {recording.killed_s:.2f} s; a gap of {recording.gap_s:.2f} s")
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
