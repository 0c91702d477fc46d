"""What strangers may send, tried with inputs that nobody would write: see `docs/threat-model.md`.

A property is a function of one input. `@fuzzed` makes two tests of it: one with a few inputs, the same every time, and a
slow one with many. `python -m tests.fuzzing` runs all of them with as many as it is told, and counts.
"""
