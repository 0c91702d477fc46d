"""`headgate top`."""

from __future__ import annotations

import os
import pty
import subprocess
import time
from collections import deque

import pytest

from headgate import cli
from headgate.cli.top import plain, render, sparkline
from headgate.dashboard.frame import Frame, MemberView, Point, RequestView
from tests.api.serving import clean_environment, command
from tests.dashboard.watching import streaming

POINT = Point(0.0, 1234.0, 2.5, 1, 0, 0.012, 0.5, 0.0009, 0.02, 0.75, 1, 2, {"client_disconnect": 3})


def frame(**changes) -> Frame:
    given = {
        "kind": "router",
        "version": "0",
        "model": "tiny",
        "state": "running",
        "tenant": "",
        "admin": True,
        "sees_requests": True,
        "total": 1,
        "now": POINT,
        "cards": [
            MemberView(id="u", name="host:1", detail="", state="ready", total=100, held=25, cached=50, tokens_s=9.0)
        ],
        "requests": [RequestView("req-1", "blue", "chat", "decode", 1.5, 42, "u")],
    }
    return Frame(**given | changes)


def shown(frame: Frame, width: int = 120, height: int = 40) -> str:
    lines = render(frame, deque([POINT]), "http://x", width, height)
    assert len(lines) <= height and all(len(plain(line)) <= width for line in lines)
    return "\n".join(map(plain, lines))


def test_a_frame_shows_rates_members_and_requests():
    text = shown(frame())
    for word in ("running", "1,234", "12 ms / 500 ms", "0.9 ms / 20 ms", "75%", "client disconnect 3", "2 resumes"):
        assert word in text, word
    assert "█████▒▒▒▒▒▒▒▒▒▒····· 25 held, 50 cached of 100" in text
    assert "req-1" in text and "42" in text and "blue" in text


def test_lines_are_truncated_in_a_small_terminal():
    many = [RequestView(f"req-{number}", "", "chat", "queued", 1.0, 0, None) for number in range(50)]
    text = shown(frame(requests=many, total=5000), width=40, height=16)
    assert "req-0" in text and "more" in text and "req-49" not in text


def test_names_given_by_clients_cannot_move_the_cursor():
    assert "\x1b" not in shown(frame(requests=[RequestView("a\x1b[2J", "\x07", "chat", "decode", 1.0, 1, None)]))


def test_a_missing_key_is_pointed_out():
    assert "--api-key" in shown(frame(requests=[], sees_requests=False))
    assert "measuring" in shown(frame(now=None))


def test_a_sparkline_scales_to_the_maximum():
    assert sparkline([0, 1, 2, 4]) == "▁▃▅█" and sparkline([]) == "" and sparkline([0, 0]) == "▁▁"


@pytest.mark.parametrize("which", ["server", "router"])
def test_once_prints_one_frame(which, request, capsys):
    url = request.getfixturevalue(which).url
    with streaming(url, "watched-1"):
        assert cli.main(["top", url, "--once"], {}) == 0
    text = capsys.readouterr().out
    assert "watched-1" in text and "decode" in text and which in text and "\x1b" not in text


def test_top_reports_an_unreachable_server_in_one_sentence(capsys):
    assert cli.main(["top", "http://127.0.0.1:9", "--once"], {}) == cli.FAILED
    assert "127.0.0.1:9 cannot be reached" in capsys.readouterr().err


def test_an_empty_key_is_refused(capsys):
    assert cli.main(["top", "--once"], {"HEADGATE_ADMIN_KEY": " "}) == cli.WRONG_USE
    assert "HEADGATE_ADMIN_KEY" in capsys.readouterr().err


def test_q_quits_and_restores_the_terminal(server):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command("top", server.url), stdin=theirs, stdout=theirs, stderr=theirs, env=clean_environment(TERM="xterm")
    )
    os.close(theirs)
    try:
        seen = read_until(ours, b"KV BLOCKS", 60)
        assert b"\x1b[?1049h" in seen  # the alternate screen
        os.write(ours, b"q")
        assert process.wait(60) == 0
        assert b"\x1b[?1049l" in read_until(ours, b"\x1b[?1049l", 60)
    finally:
        process.kill()
        process.wait(60)
        os.close(ours)


def read_until(fd: int, wanted: bytes, timeout_s: float) -> bytes:
    os.set_blocking(fd, False)
    seen, until_s = b"", time.monotonic() + timeout_s
    while wanted not in seen:
        assert time.monotonic() < until_s, seen
        try:
            seen += os.read(fd, 65536)
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:  # the other side has closed
            assert wanted in seen, seen
    return seen
