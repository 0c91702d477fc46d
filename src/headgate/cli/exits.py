"""What a command that did not do what it was asked ends with."""

FAILED, WRONG_USE = 1, 2
