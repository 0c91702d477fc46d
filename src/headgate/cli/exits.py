"""Exit codes of commands that fail: at run time, or because of wrong arguments."""

FAILED, WRONG_USE = 1, 2
