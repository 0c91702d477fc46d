"""Breaks rules of router, API and engine, one at a time, and shows that the simulation notices.

Run it with `python -m tests.sim.mutants [SEEDS]`.
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
TIMEOUT_S = 300
RUN = """
import sys
from headgate.testing.sim.world import simulate
for seed in range(int(sys.argv[1])):
    report = simulate(seed)
    if report.failures:
        sys.exit(f"seed {seed}: {report.failures[0].splitlines()[0]}")
"""


@dataclass(frozen=True)
class Mutant:
    rule: str  # the rule that is broken
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "load is given back whatever happens",
        "router/fleet.py",
        "    def __exit__(self, *exc: object) -> None:\n        self.give_back()\n",
        "    def __exit__(self, *exc: object) -> None:\n        if exc[0] is None:\n            self.give_back()\n",
    ),
    Mutant(
        "load is given back once",
        "router/fleet.py",
        "        self.worker.in_flight -= 1\n",
        "        self.worker.in_flight -= 1 + (self.worker.errors > 0)\n",
    ),
    Mutant(
        "a place is given back whatever happens",
        "router/relay.py",
        "                await self._carry()\n            finally:\n                router.admission.leave(self.tenant)\n",
        "                await self._carry()\n                router.admission.leave(self.tenant)\n            finally:\n"
        "                pass\n",
    ),
    Mutant(
        "only whole events are passed on",
        "router/attempt.py",
        "        self._tail = data[end:]\n        if len(self._tail) > LONGEST_EVENT:\n"
        '            self.fail("an event of its answer never ends")\n        return data[:end]\n',
        "        return data\n",
    ),
    Mutant(
        "an end that nobody wished for is veiled",
        "router/attempt.py",
        "        if VEIL in data:\n            data = self._set_aside(data)\n        if data:\n",
        "        if data:\n",
    ),
    Mutant(
        "who goes on knows what was said",
        "router/relay.py",
        '        return splice(body, "resume", self.journal.resume(streamed=self.ask.stream))\n',
        "        return body\n",
    ),
    Mutant(
        "who goes on knows the last token",
        "router/journal.py",
        'b",".join(filter(None, ids))',
        'b",".join(filter(None, ids[:-1]))',
    ),
    Mutant(
        "who goes on knows how much text was read",
        "router/journal.py",
        '"delivered_chars": told.chars if streamed else 0,',
        '"delivered_chars": max(told.chars - 1, 0) if streamed else 0,',
    ),
    Mutant(
        "who goes on knows which choices have ended",
        "router/journal.py",
        '                        "finish": told.finish,\n',
        '                        "finish": None,\n',
    ),
    Mutant(
        "what an answer ended with reaches its client",
        "router/relay.py",
        "            self.client.write(LAST_CHUNK)\n        self.client.finished(keep_alive=self._chunked)\n",
        "            pass\n        self.client.finished(keep_alive=self._chunked)\n",
    ),
    Mutant(
        "a request that has ended is forgotten",
        "router/router.py",
        "        if self.live.get(exchange.key) is exchange:\n",
        "        if self.live.get(exchange.key) is exchange and not exchange.moves:\n",
    ),
    Mutant(
        "a client that leaves the router ends its request",
        "router/relay.py",
        "    def client_left(self) -> None:\n        if self.task is not None:\n            self.task.cancel()\n",
        "    def client_left(self) -> None:\n        pass\n",
    ),
    Mutant(
        "a worker that shuts down may come back",
        "router/monitor.py",
        '    "draining": "paused",',
        '    "draining": "draining",',
    ),
    Mutant(
        "a slow reader gets everything",
        "router/downstream.py",
        "    def pause_writing(self) -> None:\n        self._full = True\n",
        "    def pause_writing(self) -> None:\n        self._full = True\n        self.write = lambda data: None\n",
    ),
    Mutant(
        "text that was not delivered is owed",
        "api/generation.py",
        "        piece.text, self._owed = piece.text[:delivered_chars], piece.text[delivered_chars:]\n",
        '        piece.text, self._owed = piece.text[:delivered_chars], ""\n',
    ),
    Mutant(
        "held back text is told at the end",
        "api/generation.py",
        "                piece.text += self.rest()\n",
        "                pass\n",
    ),
    Mutant(
        "a stop string ends an answer where it was complete",
        "api/generation.py",
        "            if self.stopped:\n                _cut(piece, heard)\n                return text\n",
        "            if self.stopped:\n                return text\n",
    ),
    Mutant(
        "the journal has every token",
        "api/journal.py",
        "        if block := token_lines(job, piece, chars) + self._finish(job, piece, event):\n",
        "        if block := (token_lines(job, piece, chars) if event else b'') + self._finish(job, piece, event):\n",
    ),
    Mutant(
        "a stream without a seed goes on in the same random stream",
        "api/serve.py",
        "        body.seed = seed_of(call.request_id)",
        "        body.seed = seed_of(call.request_id + str(body.resume is not None))",
    ),
    Mutant(
        "a client that leaves a server ends its request",
        "api/sse.py",
        '    while (await receive())["type"] != "http.disconnect":\n        pass\n    raise ClientGone\n',
        "    await asyncio.sleep(1e9)\n",
    ),
    Mutant(
        "leaving a stream aborts it",
        "engine/client.py",
        "            self.abort(stream.id, stream.cause)\n",
        "            pass\n",
    ),
    Mutant(
        "aborts of one moment are all sent",
        "engine/client.py",
        "        for cause in dict.fromkeys(aborts.values()):\n",
        "        for cause in list(dict.fromkeys(aborts.values()))[1:]:\n",
    ),
    Mutant(
        "an engine that is lost ends its streams",
        "engine/client.py",
        "        for stream in streams:\n            stream.fail(error)\n",
        "",
    ),
    Mutant(
        "a stream that moves takes its tokens along",
        "engine/replicas.py",
        "generated=tuple(tokens), timeout_s=timeout_s",
        "generated=request.generated, timeout_s=timeout_s",
    ),
    Mutant(
        "a pause ends what it should",
        "engine/control.py",
        'return self._end(list(self._scheduler.sequences), "pause") if pause.mode == "abort" else {}',
        "return {}",
    ),
    Mutant(
        "what old weights made is told as theirs",
        "engine/control.py",
        "        self._tell()\n        version = self._scheduler.version + 1",
        "        version = self._scheduler.version + 1",
    ),
    Mutant(
        "new weights find no KV of the old ones",
        "core/sequence.py",
        "root_key(version, self.request.adapter, self.request.salt)",
        "root_key(0, self.request.adapter, self.request.salt)",
    ),
]

# Mutants that break no promise, and why.
EQUIVALENT: dict[str, str] = {
    "an end that nobody wished for is veiled": "veiled lines are comments: what has no end is lost, and goes on elsewhere",
    "what old weights made is told as theirs": "a turn tells before it goes on with commands, and a pause makes nothing",
}


def main(seeds: int, only: str = "") -> int:
    survivors = 0
    mutants = [mutant for mutant in MUTANTS if only in mutant.rule]
    for mutant in mutants:
        verdict = judge(mutant, seeds)
        if verdict is None and mutant.rule in EQUIVALENT:
            verdict = "equivalent: " + EQUIVALENT[mutant.rule]
        survivors += verdict is None
        print(f"{mutant.rule:72s} {verdict or 'SURVIVED'}", flush=True)
    print(f"{len(mutants)} mutants, {survivors} survived without a reason")
    return survivors


def judge(mutant: Mutant, seeds: int) -> str | None:
    """What the simulation said, or None if it said nothing."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "headgate"
        shutil.copytree(ROOT / "src/headgate", package, ignore=shutil.ignore_patterns("__pycache__"))
        path = package / mutant.file
        text = path.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.rule}: the line to break occurs {text.count(mutant.old)} times"
        path.write_text(text.replace(mutant.old, mutant.new))
        return noticed(folder, seeds)


def noticed(folder: str, seeds: int) -> str | None:
    env = {**os.environ, "PYTHONPATH": folder}
    command = [sys.executable, "-c", RUN, str(seeds)]
    try:
        run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "it hangs"
    if run.returncode == 0:
        return None
    return run.stderr.strip().splitlines()[-1][:110]


if __name__ == "__main__":
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    raise SystemExit(min(main(seeds, sys.argv[2] if len(sys.argv) > 2 else ""), 1))
