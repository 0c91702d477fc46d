"""Breaks each rule of the core once and shows that a test notices: `python -m tests.core.mutants [SEEDS]`.

The fuzz test runs first. If it does not notice a mutant, the core's unit tests must.

A mutant that survives must be listed in EQUIVALENT with the reason why breaking that line breaks no promise.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNIT_TESTS = [f"tests/core/test_{name}.py" for name in ("scheduler", "blocks", "leases", "windows")]
WORTH_SHOWING = ("seed ", "AssertionError", "KeyError", "IndexError", "FAILED")


@dataclass(frozen=True)
class Mutant:
    rule: str  # the rule that is broken
    file: str
    old: str
    new: str


def scheduler(rule: str, old: str, new: str) -> Mutant:
    return Mutant(rule, "core/scheduler.py", old, new)


def admission(rule: str, old: str, new: str) -> Mutant:
    return Mutant(rule, "core/admission.py", old, new)


def fetches(rule: str, old: str, new: str) -> Mutant:
    return Mutant(rule, "core/fetches.py", old, new)


def rows(rule: str, old: str, new: str) -> Mutant:
    return Mutant(rule, "core/rows.py", old, new)


def blocks(rule: str, old: str, new: str) -> Mutant:
    return Mutant(rule, "core/blocks.py", old, new)


def groups(rule: str, old: str, new: str) -> Mutant:
    return Mutant(rule, "protocol/groups.py", old, new)


def sequence(rule: str, old: str, new: str) -> Mutant:
    return Mutant(rule, "core/sequence.py", old, new)


def leases(rule: str, old: str, new: str) -> Mutant:
    return Mutant(rule, "core/leases.py", old, new)


MUTANTS = [
    admission(
        "an adapter that is not loaded is refused",
        "if adapter and adapter not in self._limits.adapters:",
        "if False:",
    ),
    scheduler(
        "rows wait for holds",
        "        if seq.holds:\n            self.leaving.add(seq)\n            return\n",
        "",
    ),
    scheduler("blocks wait for a transfer", "        elif not self._fetches.fills(seq):\n", "        else:\n"),
    scheduler(
        "a sequence that has lost its blocks publishes none",
        "        if seq.phase is not Phase.WAITING:  # a waiting",
        "        if True:  # a waiting",
    ),
    scheduler(
        "blocks of a sequence in the current draft are released after it",
        "        if seq.holds and self._drafting:\n",
        "        if False:\n",
    ),
    fetches(
        "a transfer waits for steps that touch its blocks",
        " if touched.isdisjoint(fetch.blocks)}",
        "}",
    ),
    fetches("a landed step touches no blocks", "            self.touched.popleft()\n", "            break\n"),
    scheduler(
        "the most recently launched step touches blocks",
        "            last, _ = self._launched[-1]\n",
        "            last, _ = self._launched[0]\n",
    ),
    scheduler("a sequence that has ended fetches nothing", "            self._fetches.waiting.pop(seq, None)\n", ""),
    fetches(
        "a transfer is a hold",
        "            self._started[seq.id] = seq\n            seq.holds += 1\n",
        "            self._started[seq.id] = seq\n",
    ),
    scheduler(
        "a step is a hold",
        "        seq.computed = end = start + count\n        seq.holds += 1\n",
        "        seq.computed = end = start + count\n",
    ),
    scheduler(
        "a landed step is no hold", "            seq.holds -= 1\n            seq.sampling", "            seq.sampling"
    ),
    fetches("a landed transfer is no hold", "        seq.holds -= 1\n", ""),
    rows("rows are released", "        self.free.append(row)\n", ""),
    scheduler(
        "blocks are released",
        "        self.pool.release(blocks)\n",
        "",
    ),
    scheduler(
        "mixed-weight KV is not published", "if full <= seq.published or not seq.pure:", "if full <= seq.published:"
    ),
    scheduler(
        "mixed-weight KV is not exported",
        '            if seq.exports:\n                self._finish(seq, "abort", "weights")\n',
        "",
    ),
    scheduler("new weights taint running KV", "            seq.pure = False\n", "            pass\n"),
    scheduler("new weights recompute on request", "        if recompute:\n", "        if False:\n"),
    scheduler(
        "weights change only when quiesced",
        "        return self.flow is Flow.FROZEN and not self._launched",
        "        return self.flow is Flow.FROZEN",
    ),
    admission(
        "a ticket's version is checked before fetching",
        "ticket is None or ticket.version != version or",
        "ticket is None or",
    ),
    scheduler(
        "a ticket's version is checked after landing",
        "if ok and ticket is not None and ticket.version == self.version:",
        "if ok and ticket is not None:",
    ),
    admission(
        "a ticket's keys are checked",
        "return ticket.key == seq.keys(count, version=version, block_size=size)[-1]",
        "return True",
    ),
    admission("a ticket is for whole blocks", "        if rest or ", "        if "),
    scheduler("a failed transfer is a prefill", "if ok and ticket is not None", "if ticket is not None"),
    scheduler(
        "a ticket is good for one fetch",
        "        ticket, seq.ticket = seq.ticket, None\n",
        "        ticket = seq.ticket\n",
    ),
    scheduler("a transfer leaves one token to compute", "min(ticket.tokens, seq.wanted - 1))", "ticket.tokens)"),
    fetches(
        "a transfer skips blocks that are cached locally",
        "count, start=seq.found)",
        "count)",
    ),
    admission(
        "a prefix hit leaves one token to compute",
        "seq.keys((wanted - 1) // size,",
        "seq.keys(wanted // size,",
    ),
    scheduler(
        "only known tokens are published", "full = min(seq.computed, len(seq.tokens)) //", "full = seq.computed //"
    ),
    scheduler(
        "only computed tokens are published",
        "full = min(seq.computed, len(seq.tokens)) //",
        "full = len(seq.tokens) //",
    ),
    scheduler(
        "a preempted sequence's token does not count",
        "            if seq.phase is not RUNNING:\n                # Ab",
        "            if seq.phase is Phase.FINISHED:\n                # Ab",
    ),
    scheduler(
        "an aborted sequence's token does not count",
        "            if seq.phase is not RUNNING:\n                # Ab",
        "            if seq.phase is Phase.WAITING:\n                # Ab",
    ),
    scheduler(
        "an expired lease ends its export",
        "            self.end_lease(lease.id, lease.generation, fetched=False)\n",
        "            self.leases.end(lease.id)\n",
    ),
    scheduler(
        "an export ends with its lease",
        "            self._finish(self.sequences[lease.sequence], reason, cause)\n",
        "            self.leases.end(id)\n",
    ),
    scheduler(
        "a lease ends with its export",
        "            self.leases.end(seq.lease)\n            seq.lease = None\n",
        "            seq.lease = None\n",
    ),
    scheduler(
        "blocks are lent when they have landed",
        "full = (plan.starts[i] + plan.counts[i]) // self.pool.block_size",
        "full = seq.computed // self.pool.block_size",
    ),
    scheduler(
        "only whole blocks are lent",
        "full = (plan.starts[i] + plan.counts[i]) //",
        "full = (plan.starts[i] + plan.counts[i] + 3) //",
    ),
    admission(
        "an export holds only the blocks that it exports",
        "groups.stripes_for(seq.wanted)\n",
        "groups.stripes_for(len(seq.tokens))\n",
    ),
    scheduler(
        "a preempted export ends",
        '        if seq.exports:\n            self._finish(seq, "abort", "preempted")\n        elif',
        "        if",
    ),
    scheduler(
        "a sequence without room is returned for rescheduling if enabled",
        "        elif self.limits.reschedules and",
        "        elif False and",
    ),
    admission("an export has a limited wait for blocks", "limits.export_wait_s if request.export_kv else inf", "inf"),
    scheduler(
        "an export that has started has no wait limit",
        "        seq.deadline_s = inf if seq.request.timeout_s is None",
        "        seq.deadline_s = seq.deadline_s if seq.request.timeout_s is None",
    ),
    scheduler("an unwanted ticket is reported", "            self.unwanted.append(seq.id)\n", ""),
    scheduler(
        "an unused ticket is released",
        "        if seq.phase is Phase.RUNNING:\n            self._drop_ticket(seq)\n",
        "",
    ),
    scheduler("an export without a block ends at once", "        if seq.limit == 1:", "        if False:"),
    admission(
        "an engine that serves no KV exports none", "        if not self._limits.exports:", "        if False:"
    ),
    scheduler(
        "a shutdown returns sequences that can continue elsewhere",
        'if cause == "shutdown" and self.limits.reschedules else "abort"',
        'if False else "abort"',
    ),
    scheduler("a prefix hit holds its blocks", "        self.pool.retain(present(room.hit))\n", ""),
    scheduler(
        "a frozen scheduler runs nothing", "        if self.flow is Flow.FROZEN:\n            return None\n", ""
    ),
    scheduler(
        "draining admits no new sequences",
        "        if seq.holds or (self.flow is Flow.DRAIN and not seq.preempted):",
        "        if seq.holds:",
    ),
    scheduler(
        "draining finishes preempted sequences",
        "(self.flow is Flow.DRAIN and not seq.preempted)",
        "(self.flow is Flow.DRAIN)",
    ),
    scheduler(
        "a held sequence is not readmitted",
        "        if seq.holds or (self.flow is Flow.DRAIN and not seq.preempted):",
        "        if self.flow is Flow.DRAIN and not seq.preempted:",
    ),
    scheduler(
        "deadlines end sequences",
        '            self._finish(seq, "abort", "capacity" if',
        '            return\n            self._finish(seq, "abort", "capacity" if',
    ),
    scheduler(
        "a finished sequence leaves the deadlines",
        "        self._deadlines.remove(seq)\n        self._outbox",
        "        self._outbox",
    ),
    scheduler("an abort returns live ids only", "        return live\n", "        return list(ids)\n"),
    scheduler(
        "an id given twice is aborted once",
        "            if seq := self.sequences.get(id):\n                self._finish",
        "            if seq := self.sequences[id]:\n                self._finish",
    ),
    scheduler("a step stays within its budget", "                todo = min(todo, draft.budget)\n", ""),
    scheduler("admission stays within the budget", "min(seq.todo, draft.budget))", "seq.todo)"),
    admission("blocks for an idle prefix are counted once", "need + pool.idle(held) + running", "need + running"),
    admission(
        "a request that can never fit is refused",
        "        if prompt_len + max_tokens > most:",
        "        if prompt_len > most:",
    ),
    admission(
        "a prompt needs room for an answer", "        if prompt_len >= most and", "        if prompt_len > most and"
    ),
    admission(
        "capacity bounds the context",
        "self.max_context = min(limits.max_context, fits)",
        "self.max_context = limits.max_context",
    ),
    admission("unknown tokens are refused", ">= self._limits.vocab_size:", "> 2**31:"),
    admission(
        "priority orders the queue",
        "order=(request.priority, due_s, number),",
        "order=(-request.priority, due_s, number),",
    ),
    scheduler(
        "the worst sequence is preempted",
        "return max(\n            self.running,\n            key=lambda seq: (owned",
        "return min(\n            self.running,\n            key=lambda seq: (owned",
    ),
    admission("a tenant leaves rows to others", "self._row_shares.may_take(tenant, several=True)", "True"),
    admission("a tenant leaves blocks to others", "if not own or own + need", "if True or own + need"),
    scheduler(
        "the tenant with the fewest rows is next",
        "key=lambda seq: (held[seq.request.tenant], self._rank(seq))",
        "key=lambda seq: self._rank(seq)",
    ),
    scheduler(
        "the tenant with the most blocks is preempted",
        "(owned[seq.request.tenant] if count[seq.request.tenant] > 1 else 0, seq.order)",
        "seq.order",
    ),
    scheduler(
        "no sequence is preempted while blocks are being released",
        "            if self.returning:\n                return False",
        "            if False:\n                return False",
    ),
    scheduler(
        "a sequence that preempts itself does not run",
        "            if victim is seq:\n                return False\n",
        "",
    ),
    scheduler(
        "preempted sequences keep their place in the queue",
        "return (seq.started_s is None, *seq.order)",
        "return (seq.started_s is not None, *seq.order)",
    ),
    scheduler("a stop token ends the answer", "        if token in seq.stops or len", "        if len"),
    scheduler(
        "max_tokens ends the answer",
        "        elif len(seq.tokens) >= seq.limit:",
        "        elif len(seq.tokens) > seq.limit:",
    ),
    scheduler("min_tokens holds a stop back", " and seq.output_len > seq.request.sampling.min_tokens:", ":"),
    admission("ignore_eos is obeyed", "        if not sampling.ignore_eos:\n", "        if True:\n"),
    scheduler(
        "an answer that was complete on another engine ends at once",
        "        self._finish_if_done(seq)\n\n    def abort",
        "\n    def abort",
    ),
    admission(
        "a scored position is computed", "min(seq.wanted, seq.scored) if seq.unscored else seq.wanted", "seq.wanted"
    ),
    admission("a scored prompt is not fetched", " or seq.unscored:", ":"),
    scheduler(
        "a prompt without an answer ends when it is computed",
        "elif seq.prompt_only and plan.starts[i] + plan.counts[i] == seq.wanted:",
        "elif False:",
    ),
    scheduler("a pooled prompt samples nothing", " + seq.sampling and not seq.pooled", " + seq.sampling"),
    admission("the last token of a pooled prompt is computed", "return limit + 1  #", "return limit  #"),
    admission("a mean needs all tokens", 'if seq.request.pooling == "mean":', "if False:"),
    scheduler(
        "scores begin where the request asks",
        "first = max(start + 1, seq.request.sampling.prompt_logprobs_start)",
        "first = start + 1",
    ),
    admission("admission leaves room to grow", "pool.idle(held) + running * len(groups) >", "pool.idle(held) >"),
    admission(
        "unknown generated tokens are refused",
        'packed = array("I", tokens)',
        'packed = array("I", request.prompt)',
    ),
    admission(
        "a ticket for more than the prompt is refused",
        "        if rest or ticket.tokens > len(seq.tokens) or",
        "        if rest or",
    ),
    scheduler(
        "the last block of an answer is published",
        "            self._publish(seq)\n        self._dequeue",
        "            pass\n        self._dequeue",
    ),
    scheduler(
        "the first outputs carry the first version", "self._outbox = Outputs(version)", "self._outbox = Outputs()"
    ),
    scheduler("a position is scored once", "fresh = scores[max(0, seq.scored - first) :]", "fresh = scores"),
    scheduler("the terminal output comes once", "        del self.sequences[seq.id]\n", ""),
    scheduler("no report of experts is lost", "(*self._outbox.routed.get(seq.id, ()), experts)", "(experts,)"),
    admission("experts must be kept", " and not self._limits.keeps_routed_experts:", " and False:"),
    admission("a grammar needs a tokenizer", " and not self._limits.takes_grammars:", " and False:"),
    admission("a grammar means lockstep", "lockstep=sampling.grammar is not None,", "lockstep=False,"),
    scheduler(
        "a token that broke its grammar is not sent", "            if index in result.lost:", "            if False:"
    ),
    scheduler(
        "tokens after the end are dropped",
        "            if seq.phase is Phase.FINISHED:\n                return\n",
        "",
    ),
    scheduler(
        "a slice without a token is computed again",
        "            seq.computed -= 1  # nothing",
        "            pass  # nothing",
    ),
    scheduler(
        "each slice gets its own tokens",
        "                last += next(lengths)",
        "                last += min(next(lengths), 1)",
    ),
    scheduler("the oldest step lands first", "self._launched.popleft()", "self._launched.pop()"),
    sequence(
        "the last token is never computed",
        "return min(len(self.tokens) + self.sampling, self.limit - 1)",
        "return len(self.tokens) + self.sampling",
    ),
    sequence("lockstep waits for the token", "        if self.sampling and self.lockstep:", "        if False:"),
    sequence(
        "lockstep waits only for tokens", "if self.sampling and self.lockstep:", "if self.holds and self.lockstep:"
    ),
    sequence("keys are rooted in the version", "root_key(version, self", "root_key(0, self"),
    sequence(
        "keys follow the version",
        "        if self._keys_version != version:\n            self._keys, self._keys_version = [], version\n",
        "",
    ),
    sequence("a preempted sequence starts over", "        self.computed = self.sampling = self.published = 0\n", ""),
    sequence(
        "a readmitted row is sent to the device again",
        "self.row, self.blocks, self.shown = -1, [], 0",
        "self.row, self.blocks = -1, []",
    ),
    Mutant(
        "new blocks are sent to the device",
        "core/draft.py",
        "            self.grown.append((seq.row, blocks))",
        "            pass",
    ),
    Mutant("keys are chained", "protocol/keys.py", "blake2b(parent + data", "blake2b(data"),
    groups(
        "a block is given back when no window needs it",
        "max(0, position - window) //",
        "max(0, position - window + 1) //",
    ),
    groups(
        "a prefix hit has what each window needs",
        "        while (shorter := min(self._up_to_gap(*entry, stripes) for entry in enumerate(columns))) < stripes:",
        "        while (shorter := self._up_to_gap(0, columns[0], stripes)) < stripes:",
    ),
    groups(
        "a shorter prefix is looked up in all groups again",
        "            stripes = shorter\n        return stripes",
        "            return shorter\n        return stripes",
    ),
    groups("groups have keys of their own", "key + ending for", "key for"),
    groups(
        "a window has its blocks and those of a step",
        "batch_tokens - 2) // self.block_size + 2",
        "batch_tokens) // self.block_size",
    ),
    scheduler(
        "windows give blocks back", "                self._give_back(seq, seq.computed)\n", "                pass\n"
    ),
    scheduler(
        "blocks are given back after the draft",
        "        draft.add_slice(seq, start, count, samples)\n        self._publish(seq)\n",
        "        draft.add_slice(seq, start, count, samples)\n        self._publish(seq)\n"
        "        self._give_back(seq, seq.computed)\n",
    ),
    scheduler(
        "a block given back is not given back again",
        "            seq.blocks[place] = ABSENT\n",
        "            pass\n",
    ),
    scheduler(
        "blocks that a fetch did not fill are not published",
        "            self._give_back(seq, ticket.tokens)",
        "            pass",
    ),
    scheduler("a block given back is not published", "            if block != ABSENT:\n", "            if True:\n"),
    scheduler(
        "a tenant does not own what it gave back",
        "        seq.own -= sum(place >= seq.found * len(self._groups) for place in places)\n",
        "",
    ),
    admission(
        "an export of more than the pool is refused",
        "        if exported > self.max_whole:",
        "        if exported > self.max_context:",
    ),
    admission("a fetch of more than the pool is a prefill", " or seq.wanted > self.max_whole:", ":"),
    leases("a stale generation is refused", " and lease.generation == generation else None", " else None"),
    leases("leases expire", "return [lease for lease in self if lease.until_s <= now_s]", "return []"),
    leases("an ended lease is gone", "        del self._leases[id]\n", "        pass\n"),
    leases("the end of a lease is reported", "        self._news.append(Withdrawn(id))\n", ""),
    leases(
        "lease events are reported once", "        news, self._news = self._news, []\n", "        news = self._news\n"
    ),
    blocks(
        "an evicted block loses its key",
        "            self._forget(block)\n        self._holders[block] = 1",
        "        self._holders[block] = 1",
    ),
    blocks(
        "a retained block is not evictable", "                del self._cached[block]\n", "                pass\n"
    ),
    blocks(
        "a published block stays cached", "                if block in self._key_of:\n", "                if False:\n"
    ),
    blocks(
        "an unpublished block is freed", "                if block in self._key_of:\n", "                if True:\n"
    ),
    blocks("a hit is a prefix", "blocks[: blocks.index(ABSENT)]", "[block for block in blocks if block >= 0]"),
    blocks(
        "the first block published under a key is kept",
        "if key not in self._block_of and block not in self._key_of:",
        "if block not in self._key_of:",
    ),
    blocks("a flushed block is free", "        self._free.extend(dropped)\n", ""),
    blocks("an eviction moves the horizon", "            self.horizon_s = max(self.horizon_s, used_s)\n", ""),
    blocks("the horizon never moves back", "= max(self.horizon_s, used_s)", "= used_s"),
    blocks("a flush moves the horizon", "        self.move_horizon()\n        return", "        return"),
    blocks("blocks are stamped on release", "self._cached[block] = self.now_s", "self._cached[block] = 0.0"),
    scheduler("new weights move the horizon", "        self.pool.move_horizon()\n", ""),
]

# A mutant without a change, for which no test may fail. It shows that the copied package can be imported.
UNBROKEN = scheduler("nothing is broken", "class Scheduler:", "class Scheduler:")

# Mutants that break no promise, and why.
EQUIVALENT: dict[str, str] = {}


def main(seeds: int) -> int:
    survivors = 0
    assert (said := judge(UNBROKEN, seeds)) is None, f"the unbroken core fails: {said}"
    for mutant in MUTANTS:
        verdict = judge(mutant, seeds)
        if verdict is None and mutant.rule in EQUIVALENT:
            verdict = "equivalent: " + EQUIVALENT[mutant.rule]
        survivors += verdict is None
        print(f"{mutant.rule:55s} {verdict or 'SURVIVED'}", flush=True)
    print(f"{len(MUTANTS)} mutants, {survivors} survived without a reason")
    return survivors


def judge(mutant: Mutant, seeds: int) -> str | None:
    """Return which test noticed the mutant; None if none did."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "headgate"
        shutil.copytree(ROOT / "src/headgate", package, ignore=shutil.ignore_patterns("__pycache__"))
        path = package / mutant.file
        text = path.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.rule}: the line to break occurs {text.count(mutant.old)} times"
        path.write_text(text.replace(mutant.old, mutant.new))
        fuzz = [sys.executable, "-m", "tests.core.fuzz", "0", str(seeds)]
        unit = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *UNIT_TESTS]
        for name, command in (("fuzz", fuzz), ("unit", unit)):
            if (said := notices(command, folder)) is not None:
                return f"caught by {name}: {said}"
        return None


def notices(command: list[str], folder: str) -> str | None:
    """Run `command` with the mutated package in `folder`; returns its output if it fails, else None."""
    env = {**os.environ, "PYTHONPATH": folder}
    try:
        run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "it hangs"
    if run.returncode == 0:
        return None
    return "; ".join(line for line in (run.stdout + run.stderr).splitlines() if line.startswith(WORTH_SHOWING))[:100]


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 60))
