"""Shell completion. The bash script is run by bash; the other scripts are searched for every command and flag."""

from __future__ import annotations

import subprocess

import pytest

from headgate import cli
from headgate.cli.completion import nodes


def script(shell: str, capsys) -> str:
    assert cli.main(["completion", shell], {}) == 0
    return capsys.readouterr().out


def completed(text: str, script: str) -> list[str]:
    """The proposals of bash for a line with the cursor at its end."""
    words = text.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _headgate; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", script + ask], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("headgate se", ["serve"]),
        ("headgate bench ", ["serve", "lifecycle", "prefix", "disagg", "router", "compare"]),
        ("headgate bench serve --dat", ["--dataset"]),
        ("headgate serve --dtype b", ["bfloat16"]),
        ("headgate serve --port ", []),
        ("headgate serve ", []),
        ("headgate bench lifecycle http://x --ro", ["--rounds"]),
        ("headgate serve --host bench --deter", ["--deterministic"]),
        ("headgate completion z", ["zsh"]),
        ("headgate --ver", ["--version"]),
    ],
)
def test_bash_completes_commands_flags_and_choices(text, words, capsys):
    assert completed(text, script("bash", capsys)) == words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_flag_is_in_the_script(shell, capsys):
    printed = script(shell, capsys)
    for node in nodes(cli.parser()):
        assert all(word in printed for word in node.words), node.path
        names = [name.lstrip("-") if shell == "fish" else name for flag in node.flags for name in flag.names]
        assert all(name in printed for name in names), node.path


def test_an_unknown_shell_is_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(["completion", "tcsh"], {})
    assert "tcsh" in capsys.readouterr().err
