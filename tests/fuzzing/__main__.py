"""Runs every property with many inputs and prints their number: `python -m tests.fuzzing [TIMES]`.

`TIMES` multiplies the number of inputs of the quick tests. Exits with 1 if a property does not hold.
"""

from __future__ import annotations

import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

from tests.fuzzing.properties import PROPERTIES


def main(times: int = 200) -> int:
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        import_module(f"tests.fuzzing.{path.stem}")
    failed, began_s = 0, time.monotonic()
    for each in PROPERTIES:
        started_s = time.monotonic()
        try:
            each.run(each.few * times, database=None)
        except Exception:
            failed += 1
            traceback.print_exc()
        print(f"{each.tried:8} inputs {time.monotonic() - started_s:7.1f} s  {each.name}", flush=True)
    tried = sum(each.tried for each in PROPERTIES)
    print(f"{tried:8} inputs {time.monotonic() - began_s:7.1f} s  {len(PROPERTIES)} properties, {failed} failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
