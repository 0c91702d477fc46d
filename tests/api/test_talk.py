"""`headgate run` and `headgate chat`, against a server and with a model of their own."""

from __future__ import annotations

import io
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headgate import cli
from headgate.cli import talk
from headgate.testing.tiny import tiny_model
from tests.api.serving import clean_environment, command

GREEDY = ["--temperature", "0", "--max-tokens", "12"]


def expected(server, *contents: str) -> str:
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    answer = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 12})
    return answer.json()["choices"][0]["message"]["content"]


def test_an_answer_of_a_server_is_printed(server, capsys):
    assert cli.main(["run", server.url, "One, two,", *GREEDY], {}) == 0
    assert capsys.readouterr().out == expected(server, "One, two,") + "\n"


def test_an_answer_of_a_model_in_the_process_is_that_of_a_server(server, capsys, tmp_path):
    model = tiny_model(tmp_path / "tiny")
    assert cli.main(["run", str(model), "One, two,", "--device", "cpu", *GREEDY], {}) == 0
    assert capsys.readouterr().out == expected(server, "One, two,") + "\n"


def test_a_prompt_is_read_from_standard_input(server, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("One, two,\n"))
    assert cli.main(["run", server.url, *GREEDY], {}) == 0
    assert capsys.readouterr().out == expected(server, "One, two,") + "\n"


def test_a_chat_remembers_the_conversation_until_a_new_one(server, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("One,\ntwo,\n\n/new\nOne,\n"))
    assert cli.main(["chat", server.url, *GREEDY], {}) == 0
    first = expected(server, "One,")
    second = expected(server, "One,", first, "two,")
    assert capsys.readouterr().out == f"{first}\n{second}\n{first}\n"


class Recorder:
    """Answers with two pieces; a question that contains "stop" is interrupted after the first."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []

    def answer(self, messages):
        self.asked.append(list(messages))
        yield "some "
        if "stop" in messages[-1]["content"]:
            raise KeyboardInterrupt
        if "fail" in messages[-1]["content"]:
            raise talk.Unanswered("the server is gone")
        yield "text"


def test_the_text_of_a_stopped_answer_stays_in_the_conversation(capsys, monkeypatch):
    recorder = Recorder()

    @contextmanager
    def responder(options, environ):
        yield recorder

    monkeypatch.setattr(talk, "responder", responder)
    monkeypatch.setattr("sys.stdin", io.StringIO("stop\nfail\ngo on\n"))
    assert cli.main(["chat", "--system", "Be brief."], {}) == 0
    contents = [message["content"] for message in recorder.asked[-1]]
    assert contents == ["Be brief.", "stop", "some ", "go on"]
    printed = capsys.readouterr()
    assert printed.out == "some \nsome some text\n"
    assert "(stopped)" in printed.err and "headgate: the server is gone" in printed.err


@contextmanager
def stalled_server() -> Iterator[tuple[str, threading.Event]]:
    """A server that sends one event and then nothing. The event is set when its client has left."""
    left = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(
                    b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [{"delta": {"content": "so far"}}]}\n\n'
                )
                while connection.recv(65536):
                    pass
                left.set()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", left


def test_an_interrupt_stops_the_answer_and_leaves_the_server():
    with stalled_server() as (url, left):
        process = subprocess.Popen(
            # A shell that runs the tests in the background makes them ignore interrupts.
            ["env", "--default-signal=INT", *command("run", url, "hello")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean_environment(),
        )
        assert process.stdout is not None
        begin = process.stdout.read(6)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
        assert left.wait(30)
    assert (begin + rest, process.returncode) == (b"so far\n", 130)
    assert b"(stopped)" in errors and b"Traceback" not in errors


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'HTTP/1.1 401 No\r\nContent-Length: 31\r\n\r\n{"error": {"message": "a key"}}', "HTTP 401: a key"),
        (b"HTTP/1.1 502 No\r\nContent-Length: 5\r\n\r\nplain", "HTTP 502: plain"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"message": "lost"}}\n\n', "lost"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {nonsense\n\n", "no answer from 127.0.0.1"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [7]}\n\n', "no answer from 127.0.0.1"),
        (b"", "no answer from 127.0.0.1"),
    ],
)
def test_a_server_that_refuses_is_reported_in_one_sentence(body, sentence, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(body)

        threading.Thread(target=serve, daemon=True).start()
        assert cli.main(["run", f"http://127.0.0.1:{listener.getsockname()[1]}", "hello"], {}) == cli.FAILED
    assert sentence in capsys.readouterr().err


def test_an_empty_prompt_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert cli.main(["run", "http://127.0.0.1:1"], {}) == cli.WRONG_USE
    assert "no prompt: give it after the model" in capsys.readouterr().err


def test_a_terminal_without_a_prompt_says_what_it_waits_for(capsys, monkeypatch):
    terminal = io.StringIO("\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert cli.main(["run", "http://127.0.0.1:1"], {}) == cli.WRONG_USE
    assert "type the prompt, then Ctrl-D" in capsys.readouterr().err


def test_a_device_is_refused_with_a_server(capsys):
    assert cli.main(["run", "http://127.0.0.1:1", "hello", "--device", "cpu"], {}) == cli.WRONG_USE
    assert "a server has its own device" in capsys.readouterr().err


@pytest.mark.parametrize(("key", "sentence"), [(" ", "HEADGATE_API_KEY is empty"), ("a\nb", "cannot be sent")])
def test_a_bad_key_is_refused(key, sentence, capsys):
    assert cli.main(["run", "http://127.0.0.1:1", "hello"], {"HEADGATE_API_KEY": key}) == cli.WRONG_USE
    assert sentence in capsys.readouterr().err
