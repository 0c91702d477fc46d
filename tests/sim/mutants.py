"""Breaks rules of router, API, engine, core and transfer, one at a time, and shows that the simulation or a test notices.

Run it with `python -m tests.sim.mutants [SEEDS] [RULE] [--jobs N] [--write]`; with `--write` it fills the table in
`docs/testing.md`.
A mutant that survives must be listed in EQUIVALENT with the reason why it breaks no guarantee.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/headgate"
TIMEOUT_S = 3600  # generous, for a loaded machine
CPU_S = 180  # CPU time; a run that needs more is considered hung
LONGEST = 110  # characters in a cell of the table
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
    test: str = ""  # the test file that catches it, if the simulation cannot


MUTANTS = [
    Mutant(
        "the load of a worker is always released",
        "router/exchange/relay.py",
        "        placement.give_back()\n\n    def _undo",
        "\n    def _undo",
    ),
    Mutant(
        "the load of a worker is released once",
        "router/fleet/fleet.py",
        "        worker.in_flight -= 1\n",
        "        worker.in_flight -= 1 + (worker.errors > 0)\n",
    ),
    Mutant(
        "an admission is always released",
        "router/exchange/relay.py",
        "        if before is not QUEUED:\n",
        "        if before is not QUEUED and not self.client.gone:\n",
    ),
    Mutant(
        "only whole events are relayed",
        "router/exchange/attempt.py",
        "        self._tail = data[end:]\n        if len(self._tail) > LONGEST_EVENT:\n"
        '            self.fail("an event of its answer never ends")\n        return data[:end]\n',
        "        return data\n",
    ),
    Mutant(
        "an unintended end is withheld",
        "router/exchange/attempt.py",
        "        if WITHHELD in data:\n            data = self._set_aside(data)\n        if data:\n",
        "        if data:\n",
        "tests/router/test_relay.py",
    ),
    Mutant(
        "a resumed answer includes what the client received",
        "router/exchange/relay.py",
        '        return splice(body, "resume", self.journal.resume(streamed=self.info.stream, ends=ends))\n',
        "        return body\n",
    ),
    Mutant(
        "a resumed answer includes the last token",
        "router/exchange/journal.py",
        'b",".join(filter(None, ids))',
        'b",".join(filter(None, ids[:-1]))',
    ),
    Mutant(
        "a resumed answer continues after the delivered text",
        "router/exchange/journal.py",
        '"delivered_chars": choice.chars if streamed else 0,',
        '"delivered_chars": max(choice.chars - 1, 0) if streamed else 0,',
    ),
    Mutant(
        "a resumed answer keeps the choices that have ended",
        "router/exchange/journal.py",
        '                        "finish": choice.finish,\n',
        '                        "finish": None,\n',
    ),
    Mutant(
        "the end of an answer reaches its client",
        "router/exchange/client_answer.py",
        "            self._client.write(LAST_CHUNK)\n",
        "            pass\n",
    ),
    Mutant(
        "a request that has ended is removed",
        "router/router.py",
        "        if self.live.get(exchange.key) is exchange:\n",
        "        if self.live.get(exchange.key) is exchange and not exchange.moves:\n",
    ),
    Mutant(
        "a client that disconnects from the router ends its request",
        "router/exchange/relay.py",
        "        self.router.client_left(self)\n        self._on(Event.GONE)\n",
        "        self.router.client_left(self)\n",
        test="tests/router/test_relay.py",
    ),
    Mutant(
        "a worker that shuts down may return",
        "router/fleet/monitor.py",
        '    "draining": "stopping",',
        '    "draining": "draining",',
        test="tests/sim/test_regressions.py",
    ),
    Mutant(
        "a slow reader gets the whole answer",
        "router/data_path/downstream.py",
        "    def pause_writing(self) -> None:\n",
        "    def pause_writing(self) -> None:\n        self.write = lambda data: None\n",
    ),
    Mutant(
        "undelivered text is sent by the next worker",
        "api/generate/generation.py",
        "        piece.text, self._owed = piece.text[:delivered_chars], piece.text[delivered_chars:]\n",
        '        piece.text, self._owed = piece.text[:delivered_chars], ""\n',
    ),
    Mutant(
        "withheld text is sent at the end",
        "api/generate/generation.py",
        "                piece.text += self.rest()\n",
        "                pass\n",
    ),
    Mutant(
        "a stop string ends an answer at the token that completes it",
        "api/generate/generation.py",
        "            if self.stopped:\n                _cut(piece, count)\n                return text\n",
        "            if self.stopped:\n                return text\n",
    ),
    Mutant(
        "the journal has every token",
        "api/generate/journal.py",
        "        if block := lines + self._finish(job, piece, event):\n",
        "        if block := (lines if event else b'') + self._finish(job, piece, event):\n",
    ),
    Mutant(
        "a stream without a seed continues the same random stream",
        "api/generate/serve.py",
        "seed_of(context.request_id))",
        "seed_of(context.request_id + str(body.resume is not None)))",
    ),
    Mutant(
        "a client that disconnects from a server ends its request",
        "edge/sse.py",
        '    while (await receive())["type"] != "http.disconnect":\n        pass\n',
        "    await asyncio.sleep(1e9)\n",
        "tests/api/test_chat.py",
    ),
    Mutant(
        "closing a stream aborts it",
        "engine/client.py",
        "            self.abort(stream.id, stream.cause)\n",
        "            pass\n",
    ),
    Mutant(
        "all aborts of one event loop iteration are sent",
        "engine/client.py",
        "        for cause in dict.fromkeys(aborts.values()):\n",
        "        for cause in list(dict.fromkeys(aborts.values()))[1:]:\n",
    ),
    Mutant(
        "a lost engine ends its streams",
        "engine/client.py",
        "        for stream in streams:\n            stream.fail(error)\n",
        "",
    ),
    Mutant(
        "a moved stream keeps its tokens",
        "engine/moving_stream.py",
        "generated=tuple(tokens), timeout_s=timeout_s",
        "generated=self._request.generated, timeout_s=timeout_s",
    ),
    Mutant(
        "a pause with abort ends running requests",
        "engine/control.py",
        'return self._end(list(self._scheduler.sequences), "pause") if pause.mode == "abort" else {}',
        "return {}",
    ),
    Mutant(
        "tokens carry the version of the weights that generated them",
        "engine/control.py",
        "        self._send_outputs()\n        version = self._scheduler.version + 1",
        "        version = self._scheduler.version + 1",
    ),
    Mutant(
        "new weights find no KV of the old ones",
        "core/sequence.py",
        "root_key(version, self.request.adapter, self.request.salt)",
        "root_key(0, self.request.adapter, self.request.salt)",
        test="tests/core/test_scheduler.py",
    ),
    # -- requested aborts, and the pauses and weights of restarted processes --
    Mutant(
        "an aborted request is sent to no other worker",
        "router/exchange/states.py",
        "        Event.UNFINISHED: lambda facts: _end(facts, Action.COUNT_MOVE),\n",
        "        Event.UNFINISHED: (State.PLACING, (Action.COUNT_MOVE, Action.PLACE)),\n",
        test="tests/router/test_relay.py",
    ),
    Mutant(
        "an abort marks the requests that it finds",
        "router/control/abort.py",
        "        else:\n            exchange.ask_end(cause)\n",
        "        else:\n            pass\n",
        test="tests/router/test_abort_in_transit.py",
    ),
    Mutant(
        "an aborted request continues on no other engine",
        "engine/moving_stream.py",
        "            self.cause, self.ending = cause, True\n",
        "            self.cause, self.ending = cause, False\n",
        test="tests/sim/test_rules.py",
    ),
    Mutant(
        "an engine that restarts during a pause is paused",
        "engine/replicas.py",
        "                replica.known = _state_after(asked, await client.call(asked), replica.known)\n",
        "",
        test="tests/sim/test_rules.py",
    ),
    Mutant(
        "a worker that restarts during a pause is paused",
        "router/fleet/catch_up.py",
        "            paused=controls.current_pause is not None,\n",
        "            paused=False,\n",
    ),
    Mutant(
        "a restarted worker is not taken for a resumed one",
        "router/fleet/fleet.py",
        "        if self.on_restart is not None:\n",
        "        if False:\n",
        test="tests/sim/test_regressions.py",
    ),
    Mutant(
        "requests are not held for a fleet that another router has resumed",
        "router/fleet/catch_up.py",
        "                controls.release_for(worker)\n                return\n",
        "                pass\n",
        test="tests/sim/test_kv.py",
    ),
    Mutant(
        "a worker with other weights than the fleet gets no requests",
        "router/fleet/fleet.py",
        "            self.floor_version = self._required_version()\n",
        "            self.floor_version = None\n",
        test="tests/router/test_fleet.py",
    ),
    Mutant(
        "an engine with other weights than the others gets no streams",
        "engine/replicas.py",
        "replica.outdated = replica.outdated, CatchUpStep.EXCLUDE in self._steps(self.asked, version)",
        "replica.outdated = replica.outdated, False",
        test="tests/sim/test_rules.py",
    ),
    Mutant(
        "a server shuts down even if its engine dies at the same moment",
        "engine/replicas.py",
        "                _raise_if_cancelled()\n",
        "",
        test="tests/sim/test_regressions.py",
    ),
    Mutant(
        "a retry is recognised by the client's own request",
        "api/generate/serve.py",
        "msgspec.structs.replace(body, kv_ticket=None, deadline_ms=None) if journal else body",
        "body",
        test="tests/sim/test_regressions.py",
    ),
    Mutant(
        "a request aborted between two workers is reported as aborted",
        "router/exchange/reports.py",
        "as_aborted(released(last[1].ending), cause, strict=strict)",
        "released(last[1].ending)",
        test="tests/sim/test_regressions.py",
    ),
    # -- KV transfer between engines --
    Mutant(
        "blocks are not reused under a running transfer",
        "core/scheduler.py",
        "        if seq.holds:\n            self.leaving.add(seq)\n            return\n",
        "        if seq.holds and not self._fetches.fills(seq):\n            self.leaving.add(seq)\n            return\n",
        test="tests/core/test_scheduler.py",
    ),
    Mutant(
        "blocks are withdrawn before they are written",
        "engine/loop.py",
        "            self._inform_transport()\n            self._recorder.planned(plan)\n",
        "            self._recorder.planned(plan)\n",
        test="tests/engine/test_loop.py",
    ),
    Mutant(
        "damaged KV is rejected",
        "transfer/fetching.py",
        "        if received != checksum.digest():\n",
        "        if False:\n",
        test="tests/transfer/test_tcp.py",
    ),
    Mutant(
        "a failed transfer becomes a local prefill",
        "core/scheduler.py",
        "        if ok and ticket is not None and",
        "        if ticket is not None and",
    ),
    Mutant(
        "a transfer leaves one token to compute",
        "core/scheduler.py",
        "min(ticket.tokens, seq.wanted - 1))",
        "ticket.tokens + 1)",
    ),
    Mutant(
        "a lent block is withdrawn",
        "transfer/tcp.py",
        "            self._offers.pop(lease).withdrawn = True\n",
        "            self._offers[lease].withdrawn = True\n",
    ),
    Mutant(
        "an unwanted ticket is released",
        "core/scheduler.py",
        "            self.unwanted.append(seq.id)\n",
        "",
    ),
    Mutant(
        "every fetch ends once",
        "transfer/tcp.py",
        "        del self._clients[client.id]\n",
        "",
    ),
    Mutant(
        "a lease ends with its sequence",
        "core/scheduler.py",
        "            self.leases.end(seq.lease)\n            seq.lease = None\n",
        "            seq.lease = None\n",
    ),
    Mutant(
        "a prefill request without a client is released",
        "router/exchange/prefill.py",
        "            self._load_share.give_back()\n",
        "            pass\n",
    ),
    Mutant(
        "the scheduler iterates over a copy of the running sequences",
        "core/scheduler.py",
        "        for seq in list(self.running):\n            if draft.budget == 0:\n",
        "        for seq in self.running:\n            if draft.budget == 0:\n",
        test="tests/core/test_scheduler.py",
    ),
    Mutant(
        "lease renewals are applied before leases expire",
        "engine/loop.py",
        "        messages = self._receive()\n",
        "        messages = self._receive()\n        self.scheduler.tick(self._clock())\n",
        test="tests/engine/test_loop.py",
    ),
    # -- the core, with whole fleets around it --
    Mutant(
        "a drain waits only for started sequences",
        "core/scheduler.py",
        "any(seq.preempted for seq in self.waiting.fronts())",
        "any(True for seq in self.waiting.fronts())",
        test="tests/engine/test_control.py",
    ),
    Mutant(
        "an abort without an id aborts nothing",
        "api/compat/sglang.py",
        "    elif body.rid:\n        abort.accept(abort.find(api.ledger, caller, [body.rid]))\n",
        "    elif body.rid is None or body.rid:\n        abort.accept(abort.find_all(api.ledger, caller))\n",
        test="tests/api/test_abort.py",
    ),
    Mutant(
        "no abort is lost between two batches",
        "engine/client.py",
        "                self._send_abort(Abort(ids[i : i + MOST_IDS], cause))\n",
        "                self._send_abort(Abort(ids[i : i + MOST_IDS - 1], cause))\n",
        test="tests/engine/test_client.py",
    ),
    Mutant(
        "a worker restarted during a pause call does not count as paused",
        "router/control/lifecycle.py",
        " if worker.boot_id != boot_id}\n",
        " if False}\n",
        test="tests/sim/test_regressions.py",
    ),
    Mutant(
        "a request that ended while workers were asked is not listed",
        "router/control/requests.py",
        " or identity in ended",
        "",
        test="tests/sim/test_regressions.py",
    ),
    Mutant(
        "a superseded attempt is not kept under its key",
        "api/generate/journal.py",
        ' or finish.cause == "superseded"',
        "",
        test="tests/sim/test_regressions.py",
    ),
    Mutant(
        "a withheld end is outdated once another worker has added to the answer",
        "router/exchange/reports.py",
        "if exchange.info.stream else extent > before",
        "if exchange.info.stream else False",
        test="tests/sim/test_regressions.py",
    ),
    Mutant(
        "tokens that a worker sent with the end are counted",
        "router/exchange/reports.py",
        "        exchange.journal.feed(released_tokens(last[1].ending))\n",
        "",
        test="tests/sim/test_regressions.py",
    ),
    Mutant(
        "a request that lacks only the end of its stream is not aborted",
        "router/exchange/reports.py",
        "(bool(unfinished) or not stream)",
        "True",
        test="tests/router/test_relay.py",
    ),
    Mutant(
        "a full worker takes precedence over a paused one as the reason of a refusal",
        "router/exchange/retry_state.py",
        "        if self.queue_was_full:\n            return isinstance",
        "        if False:\n            return isinstance",
        test="tests/router/test_relay.py",
    ),
    Mutant(
        "a partial answer takes precedence over another worker's refusal",
        "router/exchange/retry_state.py",
        "        return self.was_cut and unchanged and bool(failed)\n",
        "        return False\n",
        test="tests/router/test_relay.py",
    ),
    Mutant(
        "a worker that lost an answer may be retried after another has refused it",
        "router/exchange/retry_state.py",
        "        return bool(self._failed)\n",
        "        return self.was_lost\n",
        test="tests/router/test_relay.py",
    ),
    Mutant(
        "a full worker may be retried after another has failed",
        "router/exchange/retry_state.py",
        "            return status == 503  # after a 429 the queue drains without a change of state\n",
        "            return status in (429, 503)\n",
        test="tests/router/test_relay.py",
    ),
    Mutant(
        "a prefill worker that lost an answer may be retried",
        "router/worker_choice.py",
        '                workers = self._candidates("any", model, retry_state.unwilling, resuming)\n',
        "                pass\n",
        test="tests/router/test_relay.py",
    ),
    Mutant(
        "workers are probed before an answer ends with another caller's pause",
        "router/exchange/retry_state.py",
        "        return _ended_by_pause(self.last[1])\n",
        "        return False\n",
        test="tests/router/test_paused.py",
    ),
    Mutant(
        "an answer cut by a rolling update waits for the worker being updated",
        "router/router.py",
        "        if self.fleet.rolling and not retry_state.queue_was_full:\n            return True",
        "        if False:\n            return True",
        test="tests/sim/test_regressions.py",
    ),
    Mutant(
        "an answer whose worker was lost waits for workers paused by other callers",
        "router/router.py",
        '(*AWAITED, "paused") if retry_state.was_lost or exchange.kept else AWAITED',
        '(*AWAITED, "paused") if exchange.kept else AWAITED',
        test="tests/sim/test_regressions.py",
    ),
    Mutant(
        "an abort trusts only the worker that has the request",
        "router/control/abort.py",
        " and (holders is None or url in holders.values())\n",
        "\n",
        test="tests/router/test_abort_in_transit.py",
    ),
    Mutant(
        "an abort trusts a worker only about requests it was asked to end",
        "router/control/abort.py",
        "(asked is None or name in asked) and ",
        "",
        test="tests/sim/test_regressions.py",
    ),
    Mutant(
        "a pause ends requests on a worker that leaves the fleet",
        "router/control/lifecycle.py",
        "            ended = await self._end_at_removed_workers(_unended(accepted), caller, due_s)\n",
        "",
        test="tests/router/test_abort_in_transit.py",
    ),
    Mutant(
        "a pause ends answers that continue in the queue of a paused worker",
        "router/control/lifecycle.py",
        "        if worker is None or exchange.is_untouched:\n",
        "        if worker is None or not exchange.journal.choices:\n",
        test="tests/router/test_paused.py",
    ),
    Mutant(
        "an abort reports no end that was not sent to the client",
        "router/control/abort.py",
        "        if name not in self.errors and exchange.end_pending:\n",
        "        if False:\n",
        test="tests/router/test_abort_in_transit.py",
    ),
    Mutant(
        "an abort reaches workers that still generate an answer for its key",
        "router/control/abort.py",
        "    return [worker for worker in router.fleet if worker.url in urls",
        "    return [worker for worker in router.fleet if False",
        test="tests/sim/test_regressions.py",
    ),
    Mutant(
        "a worker that joins a held fleet and is paused counts as paused",
        "router/fleet/catch_up.py",
        "            self._controls.note_paused(worker)\n\n    def _unrecorded",
        "            pass\n\n    def _unrecorded",
        test="tests/sim/test_regressions.py",
    ),
    Mutant(
        "a control answer identifies the process that sent it",
        "router/control/fan_out.py",
        "            self._fleet.set_boot_id(worker, boot)\n",
        "            pass\n",
        test="tests/router/test_call_order.py",
    ),
    Mutant(
        "the end of a whole answer is sent even if its worker was lost",
        "router/exchange/relay.py",
        "        return bool(self.journal.choices) and reports.withheld_end(self) is None\n",
        "        return False\n",
        test="tests/sim/test_regressions.py",
    ),
    # -- bounds, tenants, truth: 61 to 80 --
    Mutant(
        "no tenant takes all admissions",
        "shares.py",
        "        if left < 0 and several:\n",
        "        if True:\n            return left >= 0\n        if left < 0:\n",
    ),
    Mutant(
        "capacity taken by one large request does not count against other tenants",
        "shares.py",
        "            left += self._excess\n",
        "            pass\n",
        test="tests/sim/test_regressions.py",
    ),
    Mutant(
        "workers are probed before a client is refused as paused",
        "router/router.py",
        "        return known and retry_state.would_report_a_pause and not retry_state.refreshed\n",
        "        return False\n",
        test="tests/router/test_paused.py",
    ),
    Mutant(
        "a request kept by a pause waits for a worker that refuses it as paused",
        "router/worker_choice.py",
        "    return exchange.kept and retry_state.was_refused_as_paused\n",
        "    return False\n",
        test="tests/router/test_paused.py",
    ),
    Mutant(
        "no worker is paused for a fleet that is being resumed",
        "router/fleet/catch_up.py",
        "            if self._controls.idle:  # again",
        "            if True:  # again",
        test="tests/router/test_paused.py",
    ),
    Mutant(
        "a router knows the prompt length of an answer that it ends",
        "router/exchange/ending.py",
        "    prompt = journal.prompt\n",
        "    prompt = 0\n",
        test="tests/sim/test_regressions.py",
    ),
    Mutant(
        "a text that cannot fit is refused by its length",
        "text/tokenizer.py",
        "        if chars <= most * (self.longest or UNBOUNDED_CHARS):\n",
        "        if True:\n",
    ),
    Mutant(
        "the format of an answer does not affect its retries",
        "router/exchange/attempt.py",
        "    rescheduled = any(reason == RESCHEDULED for reason, _ in ends)\n",
        '    rescheduled = b\'"finish_reason":"pd_reschedule"\' in ending\n',
        test="tests/router/test_relay.py",
    ),
    Mutant(
        "a strict client gets the error of each choice that was cut short",
        "api/generate/wire.py",
        "        if strict:\n            fields[",
        "        if strict and job.index == 0:\n            fields[",
        test="tests/sim/test_regressions.py",
    ),
    Mutant(
        "an end rewritten for a strict client keeps the errors of other ends",
        "router/exchange/ending.py",
        r"tokens \((?:%b)\)",
        r"tokens \((?:%b|\w+)\)",
        test="tests/router/test_relay.py",
    ),
    Mutant(
        "nothing depends on the machine's uptime",
        "api/generate/journal.py",
        "        self._sent_s = -inf\n",
        "        self._sent_s = 0.0\n",
        test="tests/test_clocks.py",
    ),
    Mutant(
        "an id belongs to its tenant",
        "router/router.py",
        "        key = exchange.tenant, id, 0\n",
        '        key = "", id, 0\n',
        test="tests/router/test_tenants.py",
    ),
    Mutant(
        "a generated id reveals no other id",
        "contract/ids.py",
        "        return PREFIX + self._drawn.pop()\n",
        "        self.count = getattr(self, 'count', 0) + 1\n        return f'{PREFIX}{0:08x}{self.count:x}'\n",
    ),
    Mutant(
        "a router enforces a deadline while a worker is silent",
        "router/exchange/relay.py",
        "            self._timer = self.router.loop.call_later(left_s, self._on, Event.DEADLINE)\n",
        "            pass\n",
    ),
    Mutant(
        "a server enforces a deadline while its engine is stopped",
        "engine/moving_stream.py",
        "timer = _call_after(request.timeout_s, self.overdue)\n",
        "timer = None\n",
        test="tests/api/test_accounting.py",
    ),
    Mutant(
        "a router ends a request whose client does not read",
        "router/data_path/downstream.py",
        "        if self._outflow.stalled_s(now_s) >= self._connections.stall_s:\n",
        "        if False:\n",
    ),
    Mutant(
        "a server ends a request whose client does not read",
        "api/server.py",
        "        if self._outflow.stalled_s(now_s) >= stall_s:\n",
        "        if False:\n",
    ),
    Mutant(
        "an abort waits at most two seconds for a client that does not read",
        "edge/outflow.py",
        "(outflow is None or outflow.stalled_s(now_s) < UNREAD_S)\n",
        "True\n",
        test="tests/api/test_stalled.py",
    ),
    Mutant(
        "no cache salt equals the cache root of another tenant",
        "protocol/keys.py",
        "    return repr((tenant, salt))\n",
        "    return f'{tenant}:{salt}' if tenant else salt\n",
    ),
    Mutant(
        "anonymous callers of a router are anonymous at its workers",
        "router/router.py",
        "        if tenant is not None and is_headgate:\n",
        "        if tenant and is_headgate:\n",
        test="tests/router/test_tenants.py",
    ),
    Mutant(
        "a worker takes no request without a key",
        "contract/keys.py",
        "        self.closed = bool(self.tenants) or worker is not None",
        "        self.closed = bool(self.tenants)",
        test="tests/api/test_keys.py",
    ),
    Mutant(
        "token counts are computed by the server, not taken from the client",
        "api/generate/jobs.py",
        "    return Finish(reason, cause, prompt_tokens, 0, output_tokens)",
        "    return Finish(reason, cause, prompt, cached, output)",
        test="tests/api/test_journal.py",
    ),
    Mutant(
        "a router answers a control call in time",
        "router/control/fan_out.py",
        "SLACK_S = 0.85  #",
        "SLACK_S = 20.0  #",
    ),
    Mutant(
        "a server answers a control call in time",
        "api/control/lifecycle.py",
        "MARGIN_S = 0.7  #",
        "MARGIN_S = 17.0  #",
    ),
    Mutant(
        "a malformed answer is reported as the error of its worker",
        "router/control/fan_out.py",
        "    except UNREADABLE as error:\n",
        "    except ZeroDivisionError as error:\n",
    ),
    Mutant(
        "a pause ends accepted requests that no worker has",
        "router/control/lifecycle.py",
        "            ended = await self.end_accepted(body, accepted, caller, due_s + SLACK_S)\n",
        "            ended = []\n",
        test="tests/router/test_paused.py",
    ),
    Mutant(
        "an abort does not name prefill requests",
        "api/control/abort.py",
        "        return [target for target in self.targets if self.by_name or target.record.kind != PREFILL]\n",
        "        return list(self.targets)\n",
        test="tests/api/test_prefill_requests.py",
    ),
    Mutant(
        "a router marks prefill requests",
        "router/exchange/prefill.py",
        'PREFILL_LINE = b"x-headgate-prefill: 1\\r\\n"\n',
        'PREFILL_LINE = b""\n',
        test="tests/router/test_disagg_counts.py",
    ),
    Mutant(
        "a pause counts requests, not choices",
        "api/control/lifecycle.py",
        "    return list(dict.fromkeys(record for record in records if record.kind != PREFILL))\n",
        "    return [record for record in records if record.kind != PREFILL]\n",
        test="tests/api/test_control.py",
    ),
    Mutant(
        "a pause counts a request that moved once",
        "router/control/results.py",
        "    return len(aborted) + unnamed[0], len(finished - aborted) + unnamed[1]\n",
        "    named = sum(map(len, (each.aborted_requests or () for each in results)))\n"
        "    return named + unnamed[0], len(finished - aborted) + unnamed[1]\n",
        test="tests/router/test_pause_counts.py",
    ),
    Mutant(
        "a pause of a server applies to requests that no engine has",
        "api/control/lifecycle.py",
        "        if finds_accepted(pause, before):\n",
        "        if pause.queue:\n",
        test="tests/api/test_accepted.py",
    ),
    Mutant(
        "an answer marked for recomputation is not rescheduled again",
        "core/scheduler.py",
        "        elif self.limits.reschedules and not seq.request.recompute:\n",
        "        elif self.limits.reschedules:\n",
        test="tests/core/test_scheduler.py",
    ),
    Mutant(
        "a pause survives engine crashes",
        "engine/replicas.py",
        " and any(isinstance(result, Denied) for result in outcome.values()):\n",
        ":\n",
    ),
    Mutant(
        "a pause that arrives after a later call is refused",
        "contract/orders.py",
        "        if order.number < self._newest.get(order.router, 0):\n",
        "        if False:\n",
        test="tests/api/test_orders.py",
    ),
    Mutant(
        "a worker that has missed a resume is resumed",
        "router/control/lifecycle.py",
        "        if not reply.status:\n            self.unanswered_resumes",
        "        if False:\n            self.unanswered_resumes",
        test="tests/router/test_call_order.py",
    ),
    Mutant(
        "an update keeps a worker paused that another caller has paused",
        "router/fleet/catch_up.py",
        "self._pause_call(FOR_AN_UPDATE, ONLY_IF_RUNNING)",
        "self._pause_call(FOR_AN_UPDATE)",
        test="tests/router/test_call_order.py",
    ),
    Mutant(
        "an update does not hide that another caller has resumed a worker",
        "router/fleet/catch_up.py",
        "        if worker in controls.paused:\n",
        "        if False:\n",
        test="tests/router/test_call_order.py",
    ),
    Mutant(
        "a router notices that an unreachable worker was resumed by another caller",
        "router/fleet/catch_up.py",
        "                if worker.boot_id is None:",
        "                if True:",
        test="tests/sim/test_regressions.py",
    ),
    Mutant(
        "a restarted worker is not paused after another router has resumed it",
        "router/fleet/catch_up.py",
        "(ONLY_IF_UNRESUMED,) if worker in controls.restarted else ()",
        "()",
        test="tests/router/test_call_order.py",
    ),
    Mutant(
        "a resume that ends a router's own update is not one of the fleet",
        "contract/orders.py",
        "            if not order.only_if:\n",
        "            if True:\n",
        test="tests/api/test_orders.py",
    ),
    Mutant(
        "a worker that paused late is resumed when another router has resumed the fleet",
        "router/control/lifecycle.py",
        "        late = [worker for worker in self._fleet if worker in self.late]\n",
        "        late = []\n",
        test="tests/router/test_call_order.py",
    ),
    Mutant(
        "a pause of an empty fleet holds nothing",
        "router/control/lifecycle.py",
        "        if not replies or all_refuse(replies):\n",
        "        if all_refuse(replies):\n",
        test="tests/router/test_call_order.py",
    ),
    Mutant(
        "the cost of a request with a key does not depend on the number of kept answers",
        "api/generate/idempotency.py",
        "        self._forget(tenant)\n        if (other",
        "        len([key for share in self._kept._tenants.values() for key in share.entries])\n"
        "        self._forget(tenant)\n        if (other",
        test="tests/api/test_idempotency.py",
    ),
    Mutant(
        "the latest request with a label does not depend on the wall clock",
        "api/accounting/ledger.py",
        "key=lambda past: past.arrived_s",
        "key=lambda past: past.usage.arrived",
        test="tests/api/test_ledger.py",
    ),
    Mutant(
        "a retry does not replace another live request",
        "router/router.py",
        "            key = exchange.tenant, id, next(self._retries)\n",
        '            key = exchange.tenant, f"{id}#{next(self._retries)}", 0\n',
        test="tests/router/test_tenants.py",
    ),
    Mutant(
        "a router decodes ids in paths",
        "router/data_path/downstream.py",
        '        head.path = unquote(path) if "%" in path else path\n',
        "        head.path = path\n",
        test="tests/router/test_tenants.py",
    ),
    Mutant(
        "the numbers in a config are bounded",
        "models/config.py",
        "        if value > LARGEST.get(key, value):\n",
        "        if False:\n",
        test="tests/models/test_mixtures.py",
    ),
    Mutant(
        "folders of killed processes are removed",
        "scratch.py",
        "    remove_stale(above)\n    own",
        "    own",
        test="tests/test_scratch.py",
    ),
    Mutant(
        "the lines about disconnected clients are limited",
        "edge/departures.py",
        "        if self._lines <= MOST_LINES:\n",
        "        if True:\n",
        test="tests/api/test_stalled.py",
    ),
    Mutant(
        "a request that only waits for its client to read has a phase",
        "api/control/requests.py",
        '    if stream.settled:\n        return "sending"\n',
        "",
        test="tests/api/test_stalled.py",
    ),
    Mutant(
        "a compiled pipe that was not constructed refuses events",
        "router/data_path/fast_path.c",
        '    if (self->raw == NULL) return PyErr_Format(PyExc_ValueError, "this pipe leads nowhere");\n',
        "",
        test="tests/router/test_fast_path.py",
    ),
    Mutant(
        "the compiled reader accepts no journal that the codec refuses",
        "router/data_path/fast_path.c",
        "at < end && at - first < most && *at >= '0' && *at <= '9'; at++) *number",
        "at < end && *at >= '0' && *at <= '9'; at++) *number",
        test="tests/router/test_fast_path.py",
    ),
    Mutant(
        "every event of a stream has only its own token ids",
        "api/generate/wire.py",
        'fields["token_ids"] = piece.tokens\n',
        'fields["token_ids"] = piece.generated_ids or piece.tokens\n',
        test="tests/transfer/test_http.py",
    ),
    Mutant(
        "an answer that no worker has room for is recomputed",
        "router/exchange/relay.py",
        "        if self.retry_state is not None and self.retry_state.must_recompute(worker):\n",
        "        if False:\n",
        test="tests/router/test_relay.py",
    ),
]

# Mutants that break no guarantee, with the reason.
EQUIVALENT: dict[str, str] = {
    "tokens carry the version of the weights that generated them": (
        "a turn sends outputs before it continues commands, and a paused engine generates nothing"
    ),
}


def main(seeds: int, only: str, jobs: int, *, write: bool) -> int:
    """Run the mutants; returns how many no check has noticed."""
    mutants = [mutant for mutant in MUTANTS if only in mutant.rule]
    verdicts: dict[str, str | None] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for mutant, verdict in zip(mutants, pool.map(partial(verdict_on, seeds=seeds), mutants), strict=True):
            verdicts[mutant.rule] = verdict
            print(f"{mutant.rule:66s} {verdict or 'SURVIVED'}", flush=True)
    survivors = [rule for rule, verdict in verdicts.items() if verdict is None]
    print(f"{len(mutants)} mutants, {len(survivors)} survived without a reason")
    if write and not survivors:
        write_table(verdicts)
    return len(survivors)


def verdict_on(mutant: Mutant, seeds: int) -> str | None:
    """Return which check noticed the mutant and its message, or why none has to; None if none did."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "headgate"
        shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
        (package / mutant.file).write_text(broken(mutant))
        said = noticed_by_test(folder, mutant.test) if mutant.test else noticed(folder, seeds)
    if said is None and mutant.rule in EQUIVALENT:
        return "equivalent: " + EQUIVALENT[mutant.rule]
    return said


def broken(mutant: Mutant) -> str:
    """Return the content of the mutant's file, with the bug."""
    text = (SOURCE / mutant.file).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.rule}: the line to break occurs {text.count(mutant.old)} times"
    return text.replace(mutant.old, mutant.new)


def noticed(folder: str, seeds: int) -> str | None:
    """Run the simulation; returns its failure, or None if it found none."""
    code, said = run([sys.executable, "-c", RUN, str(seeds)], folder, cwd=folder)
    lines = [line for line in said.splitlines() if line.startswith("seed ")] or said.strip().splitlines()
    return None if code == 0 else lines[-1]


def noticed_by_test(folder: str, test: str) -> str | None:
    """Run a test file; returns the test that failed, or None if none did."""
    code, said = run([sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test], folder, cwd=ROOT)
    failed = [line.split()[1] for line in said.splitlines() if line.startswith("FAILED ")]
    failed += [f"{test}::{name}" for name in re.findall(r"line \d+ in (test_\w+)", said)]  # the process crashed
    return None if code == 0 else failed[0].partition("[")[0] if failed else f"{test}: {said[-200:]}"


def run(command: list[str], folder: str, cwd: str | Path) -> tuple[int, str]:
    env = {**os.environ, "PYTHONPATH": folder}
    limited = ["sh", "-c", f'ulimit -t {CPU_S}; exec "$@"', "sh", *command]
    try:
        done = subprocess.run(limited, cwd=cwd, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return 1, "it hangs"
    hangs = done.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
    return done.returncode, "it hangs" if hangs else done.stdout + done.stderr


# --------------------------------------------------------------------------------------------------------- the table

TABLE = ROOT / "docs/testing.md"
UNTRIED = "not tried since it was planted"
BEGIN, END = "<!-- planted bugs -->", "<!-- end of planted bugs -->"


def write_table(verdicts: dict[str, str | None]) -> None:
    text = TABLE.read_text()
    before, _, rest = text.partition(BEGIN)
    rows = [f"| {rule} | {_cell(verdict)} |" for rule, verdict in verdicts.items()]
    head = ["| rule that was broken | the test or seed that caught it, and its message |", "|---|---|"]
    TABLE.write_text("\n".join([before + BEGIN, "", *head, *rows, "", END]) + rest.partition(END)[2])


def _cell(verdict: str | None) -> str:
    if verdict is None:
        return UNTRIED
    if verdict.startswith("tests/"):
        return f"`{verdict.rpartition('::')[2]}`"
    plain = re.sub(r" at 0x[0-9a-f]+|[<>]", "", verdict).replace("|", "/")
    return plain if len(plain) <= LONGEST else plain[:LONGEST].rsplit(" ", 1)[0] + " ..."


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("seeds", type=int, nargs="?", default=100)
    parser.add_argument("only", nargs="?", default="")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="the table in docs/testing.md")
    options = parser.parse_args()
    if options.only and options.write:
        parser.error("the table is of all rules")
    raise SystemExit(min(main(options.seeds, options.only, options.jobs, write=options.write), 1))
