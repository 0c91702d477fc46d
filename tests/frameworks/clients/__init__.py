"""One module per framework, run by `tests/frameworks/run.py` in that framework's environment.

A module is started as `python -m tests.frameworks.clients.NAME MODEL_FOLDER URL URL` and prints one line per check. It
may import the standard library, its framework and `checks`, and Headgate only if `run.py` allows it.
"""
