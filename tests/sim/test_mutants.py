"""The list of mutants matches the table in docs/testing.md, and each mutant can still be applied."""

from __future__ import annotations

import re

import pytest

from tests.sim.mutants import BEGIN, END, EQUIVALENT, MUTANTS, ROOT, TABLE, UNTRIED, Mutant, broken

NAMED = (  # bugs that other systems have had
    "blocks are not reused under a running transfer",
    "the scheduler iterates over a copy of the running sequences",
    "the load of a worker is always released",
    "a drain waits only for started sequences",
    "a resumed answer includes the last token",
    "new weights find no KV of the old ones",
    "lease renewals are applied before leases expire",
    "an abort without an id aborts nothing",
    "the load of a worker is released once",
    "no abort is lost between two batches",
)


def rows() -> dict[str, str]:
    """The table of docs/testing.md."""
    table = TABLE.read_text().partition(BEGIN)[2].partition(END)[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in cells[1:]}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule.replace(" ", "-"))
def test_a_bug_can_be_planted_and_the_result_compiles(mutant: Mutant):
    text = broken(mutant)
    if mutant.file.endswith(".py"):
        compile(text, mutant.file, "exec")
    assert not mutant.test or (ROOT / mutant.test).is_file()


def test_the_table_lists_exactly_the_planted_bugs():
    assert list(rows()) == [mutant.rule for mutant in MUTANTS]
    assert len(MUTANTS) >= 30
    assert {*NAMED} <= {*rows()} and {*EQUIVALENT} <= {*rows()}


def test_every_planted_bug_was_caught_by_a_seed_or_an_existing_test():
    tests = {mutant.rule: mutant.test for mutant in MUTANTS}
    assert UNTRIED not in rows().values()
    for rule, catch in rows().items():
        if rule in EQUIVALENT:
            assert catch.startswith("equivalent: ")
        elif tests[rule]:
            assert f"def {catch.strip('`')}(" in (ROOT / tests[rule]).read_text(), rule
        else:
            assert re.match(r"seed \d+: |it hangs", catch), rule
