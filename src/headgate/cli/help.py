"""`--help` shows the flags that most users need and fits on a screen; `--help-all` shows every flag."""

from __future__ import annotations

import argparse
from typing import Any


class CommandParser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._rare: list[argparse._ArgumentGroup] = []

    def add_rare_group(self, title: str) -> argparse._ArgumentGroup:
        """Add a group of flags that only `--help-all` shows."""
        if not self._rare:
            self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show rarely used flags, too, and exit")
        self._rare.append(self.add_argument_group(title))
        return self._rare[-1]

    def print_help(self, file: Any = None) -> None:
        """Print what `--help` shows; `format_help` has all flags."""
        for action in [action for group in self._rare for action in group._group_actions]:
            action.help = argparse.SUPPRESS
        super().print_help(file)


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        print(parser.format_help(), end="")
        parser.exit()
