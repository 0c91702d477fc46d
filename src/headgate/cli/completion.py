"""`headgate completion SHELL`: a completion script for commands and flags, generated from the argument parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any


def add_completion(command: argparse.ArgumentParser, root: argparse.ArgumentParser) -> None:
    command.set_defaults(run=partial(completion, root))
    command.add_argument("shell", choices=tuple(SHELLS), metavar="SHELL", help=f"{', '.join(SHELLS)}")
    command.epilog = "In ~/.bashrc: source <(headgate completion bash)"


def completion(root: argparse.ArgumentParser, options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    print(SHELLS[options.shell](list(nodes(root))), end="")
    return 0


@dataclass(frozen=True, slots=True)
class Flag:
    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """The completions that follow the commands in `path`."""

    path: str
    words: dict[str, str]  # subcommands or choices of an argument, with their help
    flags: tuple[Flag, ...]


def nodes(parser: argparse.ArgumentParser, path: str = "") -> Iterator[Node]:
    """Yield a node for each parser of the tree, starting with the root."""
    words: dict[str, str] = {}
    flags = []
    below: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue  # an internal flag is not completed
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
    text = (action.help or "") % described
    choices = tuple(map(str, action.choices or ()))
    return Flag(tuple(action.option_strings), text, action.nargs != 0, choices)


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
    """Return the script for bash. If it proposes nothing, bash completes file names."""
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
        lines += [f"{begin} -f -a {word} -d {_quoted(text)}\n" for word, text in node.words.items()]
        for flag in node.flags:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
            value = f" -x -a '{' '.join(flag.choices)}'" if flag.choices else " -r" * flag.takes_value
            lines.append(f"{begin} {names}{value} -d {_quoted(flag.help)}\n")
    return "".join(lines)


def _quoted(text: str) -> str:
    """Quote for fish, where only the backslash and the quote are special inside single quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[list[Node]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
