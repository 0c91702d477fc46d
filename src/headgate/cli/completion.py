"""`headgate completion SHELL`: what a shell needs to complete commands and flags, read off the parser itself."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


def add_completion(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=completion)
    command.add_argument("shell", choices=tuple(SHELLS), metavar="SHELL", help=f"{', '.join(SHELLS)}")
    command.epilog = "In ~/.bashrc: source <(headgate completion bash)"


def completion(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.cli import parser

    print(SHELLS[options.shell](list(nodes(parser()))), end="")
    return 0


@dataclass(frozen=True, slots=True)
class Flag:
    names: tuple[str, ...]
    what: str
    takes_value: bool
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """What may follow the commands of `path`."""

    path: str
    words: dict[str, str]  # commands, or choices of an argument, and what they are
    flags: tuple[Flag, ...]


def nodes(parser: argparse.ArgumentParser, path: str = "") -> Iterator[Node]:
    """The parser's tree, the root first."""
    words: dict[str, str] = {}
    flags = []
    below: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue  # not for people
        if isinstance(action, argparse._SubParsersAction):
            below = dict(action.choices)
            words |= {choice.dest: choice.help or "" for choice in action._choices_actions}
        elif action.option_strings:
            flags.append(_flag(action))
        else:
            words |= dict.fromkeys(map(str, action.choices or ()), "")
    yield Node(path, words, tuple(flags))
    for name, command in below.items():
        yield from nodes(command, f"{path} {name}".strip())


def _flag(action: argparse.Action) -> Flag:
    described: Any = {**vars(action), "prog": "headgate"}
    what = (action.help or "") % described
    choices = tuple(map(str, action.choices or ()))
    return Flag(tuple(action.option_strings), what, action.nargs != 0, choices)


# ------------------------------------------------------------------------------------------------------------ shells

BASH = """\
_headgate() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} path="" words="" each
    for each in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$path $each" in
            {paths}) path="${{path:+$path }}$each" ;;
        esac
    done
    COMPREPLY=()
    case "$path:$before" in
{values}
    esac
    case "$path:$word" in
{words}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _headgate headgate
"""


def bash(tree: list[Node]) -> str:
    """Where nothing is proposed, bash proposes files."""
    paths = "|".join(f'"{" " * (" " not in node.path)}{node.path}"' for node in tree if node.path)
    values, words = [], []
    for node in tree:
        for flag in node.flags:
            if flag.takes_value:
                names = "|".join(f'"{node.path}:{name}"' for name in flag.names)
                reply = f'COMPREPLY=($(compgen -W "{" ".join(flag.choices)}" -- "$word")); ' if flag.choices else ""
                values.append(f"        {names}) {reply}return ;;")
        flags = " ".join(name for flag in node.flags for name in flag.names)
        words.append(f'        "{node.path}:-"*) words="{flags}" ;;')
        words.append(f'        "{node.path}:"*) words="{" ".join(node.words)}" ;;')
    return BASH.format(paths=paths, values="\n".join(values), words="\n".join(words))


def zsh(tree: list[Node]) -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + bash(tree)


FISH = """\
function __headgate_at
    set -l path
    for word in (commandline -opc)[2..]
        if contains -- (string join ' ' $path $word) {paths}
            set -a path $word
        end
    end
    test "$path" = "$argv"
end
"""


def fish(tree: list[Node]) -> str:
    lines = [FISH.format(paths=" ".join(f"'{node.path}'" for node in tree if node.path))]
    for node in tree:
        begin = f"complete -c headgate -n '__headgate_at {node.path}'"
        lines += [f"{begin} -f -a {word} -d {_quoted(what)}\n" for word, what in node.words.items()]
        for flag in node.flags:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
            value = f" -x -a '{' '.join(flag.choices)}'" if flag.choices else " -r" * flag.takes_value
            lines.append(f"{begin} {names}{value} -d {_quoted(flag.what)}\n")
    return "".join(lines)


def _quoted(text: str) -> str:
    """For fish, in which a backslash and a quote are the only odd characters between quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[list[Node]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
