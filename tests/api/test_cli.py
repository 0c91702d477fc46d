"""The command line: errors are one sentence and an exit code, and the help fits on a screen."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from headgate import __version__, cli
from headgate.testing.tiny import tiny_model
from tests.api.serving import clean_environment, command


def run(*arguments: object, timeout_s: float = 100, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=timeout_s, env=clean_environment(**environment)
    )


def the_sentence(result: subprocess.CompletedProcess[str]) -> str:
    """The error message: one line that begins with the program's name, and otherwise only progress bars."""
    assert "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("headgate: ")]
    return line


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"headgate {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [["serve", "--help"], ["bench", "serve", "--help"], ["bench", "compare", "--help"], ["doctor", "--help"]],
)
def test_help_fits_on_a_screen(arguments, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main(arguments)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 80


def test_all_flags_are_in_the_longer_help_only_if_they_are_rarely_used(capsys):
    for argument, lists_rare_flags in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit):
            cli.main(["serve", argument])
        output = capsys.readouterr().out
        assert "--max-running" in output and ("--kv-listen" in output) is lists_rare_flags


def test_a_port_in_use_is_reported_before_the_model_is_searched(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = run("serve", tmp_path / "no-model", "--port", port)
    assert result.returncode == 1
    assert the_sentence(result) == (
        f"headgate: port {port} on 127.0.0.1 is taken; choose another with --port, or stop the process using it"
    )


def test_a_folder_without_a_model_is_reported_in_one_sentence(tmp_path):
    result = run("serve", tmp_path, "--port", 0)
    assert result.returncode == 1
    assert str(tmp_path) in the_sentence(result) and "holds no model" in the_sentence(result)


def test_too_little_memory_is_reported_in_one_sentence(tmp_path):
    model = tiny_model(tmp_path / "model")
    result = run("serve", model, "--port", 0, "--kv-blocks", 1, "--max-context", 512)
    assert result.returncode == 1
    assert "512 tokens" in the_sentence(result)


@pytest.mark.parametrize(
    ("flags", "about"),
    [
        (["--port", "99999"], "--port"),
        (["--max-running", "0"], "max_running"),
        (["--replicas", "0"], "replicas"),
        (["--device", "gpu"], "device"),
        (["--api-keys", "/nowhere/keys"], "/nowhere/keys"),
        (["--admin-key", ""], "--admin-key"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
    ],
)
def test_an_invalid_flag_is_reported_in_one_sentence(flags, about, tmp_path, capsys):
    model = tiny_model(tmp_path / "model")
    assert cli.main(["serve", str(model), "--port", "0", *flags], {}) in (1, 2)
    errors = capsys.readouterr().err
    assert about in errors and errors.count("\n") == 1


def test_ctrl_c_while_loading_ends_at_once_and_cleanly(tmp_path):
    model = tiny_model(tmp_path / "model")
    # Repeated if the model had loaded before this process was scheduled.
    assert any(interrupted(model) for _ in range(5))


def interrupted(model: Path) -> bool:
    """Whether the signal arrived in time."""
    process = subprocess.Popen(
        command("serve", model, "--port", 0, "--log-level", "info"),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    # It logs this when it starts its engines, which takes a while.
    line = next(line for line in process.stderr if "starting" in line)
    process.send_signal(signal.SIGINT)
    timer = threading.Timer(60, process.kill)
    timer.start()
    output, errors = process.communicate()
    timer.cancel()
    assert process.returncode == 0 and "Traceback" not in line + errors
    return "ready" not in output


def test_keys_come_from_the_flag_before_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("alice:1\n")
    environ = {"HEADGATE_API_KEYS": "bob:2", "HEADGATE_ADMIN_KEY": "3"}
    options = cli.parser().parse_args(["serve", "--api-keys", str(file)])
    assert cli.read_keys(options, environ) == ({"alice": "1"}, "3")
    options = cli.parser().parse_args(["serve", "--admin-key", "4"])
    assert cli.read_keys(options, environ) == ({"bob": "2"}, "4")


@pytest.mark.parametrize("name", ["HEADGATE_API_KEYS", "HEADGATE_ADMIN_KEY"])
def test_a_variable_for_keys_that_is_empty_does_not_open_the_server(name, capsys):
    assert cli.main(["serve", "--port", "0"], {name: ""}) == cli.WRONG_USE
    errors = capsys.readouterr().err
    assert name in errors and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["serve", "http://127.0.0.1:x"], "http://127.0.0.1:x"),
        (["serve", "http://[::1"], "http://[::1"),
        (["serve", "--rate", "0"], "rate"),
        (["serve", "--rate", "nan"], "rate"),
        (["serve", "--concurrency", "0"], "concurrency"),
        (["lifecycle", "http://127.0.0.1:x"], "http://127.0.0.1:x"),
        (["lifecycle", "--concurrency", "0"], "concurrency"),
    ],
)
def test_an_invalid_benchmark_is_reported_in_one_sentence(arguments, about, capsys):
    assert cli.main(["bench", *arguments], {}) == cli.WRONG_USE
    errors = capsys.readouterr().err
    assert about in errors and errors.count("\n") == 1


def test_the_pace_is_shown_with_the_load(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "serve", "--help"])
    load = capsys.readouterr().out.partition("\nload:")[2].partition("\nrequests:")[0]
    assert "--rate" in load and "--concurrency" in load
