"""Property-based tests of everything that untrusted peers may send: see `docs/threat-model.md`.

A property is a function of one input. `@fuzzed` makes two tests of it: a quick one with a few fixed inputs, and a
slow one with many. `python -m tests.fuzzing` runs all properties with a given number of inputs, and counts them.
"""
