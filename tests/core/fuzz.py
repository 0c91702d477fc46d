"""Drives two schedulers (prefill P, decode D) over fake devices with random requests and random faults.

The fake device's tokens are a hash of the KV that it actually reads, so every ownership error becomes a wrong token.
`FuzzRun.run` raises AssertionError at the first violation. Run it alone with `python -m tests.core.fuzz FIRST LAST`.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections import Counter
from dataclasses import dataclass, field
from math import inf

import msgspec

from headgate.contract.sampling import SamplingParams
from headgate.core.blocks import BlockPool
from headgate.core.leases import Filled, Granted, Lease, Withdrawn
from headgate.core.limits import SchedulerLimits
from headgate.core.scheduler import Flow, Scheduler
from headgate.core.sequence import Phase, Sequence
from headgate.errors import RequestError
from headgate.protocol.output import Ended, Outputs
from headgate.protocol.plan import Fetch, Logprobs, RoutedExperts, StepPlan, StepResult
from headgate.protocol.request import GenerateRequest, Pooling, Ticket
from headgate.testing.device import FakeDevice, expected_entries, expected_token, expected_vector, score

BLOCK_SIZE = 4
VOCAB_SIZE = 97
EOS = (0, 17)
# Of the groups of layers. Some windows begin with a block, others in the middle of one.
WINDOWS: tuple[tuple[int | None, ...], ...] = ((None, 5), (2,), (None, 8, 3), (7, None), (4, 4, None))
EXPORT_LOST = ("preempted", "weights", "capacity", "transfer_failed")


@dataclass(eq=False)
class Transfer:
    fetch: Fetch
    copied: int = 0  # number of blocks copied so far
    wanted: bool = True


@dataclass
class Client:
    """The client of one request: checks each output that it receives."""

    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)
    scored: int = 0
    routed: array[int] = field(default_factory=lambda: array("q"))
    routed_versions: set[int] = field(default_factory=set)
    vectors: list[bytes] = field(default_factory=list)
    ended: Ended | None = None
    aborted: bool = False  # an abort was requested or a deadline passed, so an early end is allowed
    max_context: int = 0  # the longest sequence of its engine
    movable: bool = False  # its engine returns sequences for rescheduling
    checkable: bool = True  # False once its KV mixes weights, when no reference exists
    windows: tuple[int | None, ...] = (None,)  # of the groups of layers

    def receive_token(self, token: int, version: int) -> None:
        assert self.ended is None, "a token after the terminal output"
        request = self.request
        assert not request.export_kv, "an export samples nothing"
        before = [*request.prompt, *request.generated, *self.tokens]
        if self.checkable:
            assert token == expected_token(before, version, VOCAB_SIZE, self.windows), "wrong token"
        self.tokens.append(token)

    def receive_end(self, ended: Ended) -> None:
        assert self.ended is None, "ended twice"
        self.ended = ended
        sampling, request = self.request.sampling, self.request
        answer = [*request.generated, *self.tokens]
        assert ended.output_tokens == len(answer), "usage does not match what was delivered"
        assert ended.cached_tokens <= ended.prompt_tokens + len(request.generated)
        if request.export_kv:
            assert ended.finish_reason == "stop" or self.aborted or ended.cause in EXPORT_LOST, (
                "lost without a reason"
            )
            return
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else EOS)}
        for i, token in enumerate(answer[:-1]):
            assert i < sampling.min_tokens or i < len(request.generated) or token not in stops, (
                "tokens after a stop token"
            )
        if ended.finish_reason == "stop":
            assert answer[-1] in stops and len(answer) > sampling.min_tokens
        elif ended.finish_reason == "length":
            room = self.max_context - len(request.prompt)  # or less than the request came with
            most = max(room, len(request.generated)) if sampling.max_tokens is None else sampling.max_tokens
            assert len(answer) == most, "too short or too long"
        elif ended.finish_reason == "pd_reschedule":
            assert self.movable and ended.cause == "preempted"
        else:
            assert self.aborted, f"ended with {ended.finish_reason} without an abort or a deadline"
        if ended.finish_reason in ("stop", "length") and ended.timings.started_s is not None:
            wanted = range(0) if sampling.prompt_logprobs is None else self.positions
            assert self.scored == len(wanted), "each prompt position is scored exactly once"
            assert len(self.vectors) == (request.pooling is not None), "a pooled prompt has one vector"
            self.check_routed([*request.prompt, *answer])

    def receive_scores(self, scores: tuple[Logprobs, ...], version: int) -> None:
        assert self.ended is None, "scores after the terminal output"
        prompt = self.request.prompt
        entries = expected_entries(prompt, version, 0, self.windows[0])
        for received in scores:
            at = self.positions[self.scored]
            self.scored += 1
            assert not self.checkable or received == score(entries[at - 1], prompt[at]), "wrong score"

    def receive_vector(self, vector: bytes, version: int) -> None:
        assert self.ended is None, "a vector after the terminal output"
        prompt, pooling = self.request.prompt, self.request.pooling
        assert pooling is not None, "a vector that was not requested"
        expected = expected_vector(prompt, version, pooling, self.windows)
        assert not self.checkable or vector == expected, "wrong vector"
        self.vectors.append(vector)

    def receive_routed(self, reports: tuple[RoutedExperts, ...], version: int) -> None:
        assert self.ended is None, "experts after the terminal output"
        self.routed_versions.add(version)
        for report in reports:
            assert report.start <= len(self.routed), "the experts of some tokens are missing"
            self.routed += array("q", report.ids)[len(self.routed) - report.start :]

    def check_routed(self, tokens: list[int]) -> None:
        """The fake device reports the KV of each token as its experts. The last token is never computed."""
        if self.request.sampling.return_routed_experts:
            uncomputed = 3 if self.request.sampling.grammar else 1  # the last slice may have sampled several tokens
            assert len(self.routed) >= len(tokens) - uncomputed, "the experts of the last tokens are missing"
            if self.checkable and len(self.routed_versions) == 1:
                (version,) = self.routed_versions
                routed = list(self.routed[: len(tokens) - 1])
                assert routed == expected_entries(tokens[: len(routed)], version), "wrong experts"

    @property
    def positions(self) -> range:
        """The prompt positions to score."""
        return range(max(1, self.request.sampling.prompt_logprobs_start), len(self.request.prompt))


class Engine:
    """One scheduler with its device and clients."""

    def __init__(self, name: str, rng: random.Random, windows: tuple[int | None, ...]) -> None:
        self.name, self.rng, self.windows = name, rng, windows
        num_blocks = rng.choice([8, 12, 24]) * len(windows)
        limits = SchedulerLimits(
            max_context=rng.choice([24, 60, 200]),
            max_running=rng.choice([2, 4, 8]),
            max_batch_tokens=rng.choice([3, 8, 16]),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=EOS,
            patience_s=20,
            lease_s=25,
            export_wait_s=rng.choice([5, 60]),
            engine=name,
            generation=rng.randrange(100),
            reschedules=rng.random() < 0.2,
            keeps_routed_experts=True,
        )
        self.scheduler = Scheduler(BlockPool(num_blocks, BLOCK_SIZE, windows), limits)
        self.device = FakeDevice(num_blocks, BLOCK_SIZE, limits.max_running, VOCAB_SIZE, windows=windows)
        self.depth = rng.choice([1, 2, 3])
        self.clients: dict[int, Client] = {}
        self.resume_at = 0.0
        self.lent: dict[int, Lease] = {}  # leases that a transport would serve
        self.filled: Counter[int] = Counter()  # blocks of each lease

    def offer(self, request: GenerateRequest) -> bool:
        client = Client(
            request,
            max_context=self.scheduler.max_context,
            movable=self.scheduler.limits.reschedules,
            windows=self.windows,
        )
        self.clients[request.id] = client
        most = self.scheduler.max_context
        wanted = 1 if request.sampling.max_tokens is None else request.sampling.max_tokens
        try:
            self.scheduler.add(request)
        except RequestError:
            del self.clients[request.id]
            exported = (
                (len(request.prompt) + len(request.generated) - 1) * request.export_kv // BLOCK_SIZE * BLOCK_SIZE
            )
            too_long = len(request.prompt) + wanted > most or exported > self.scheduler.admission.max_whole
            assert too_long or max(request.prompt) >= VOCAB_SIZE, "refused a request that fits"
            return False
        assert len(request.prompt) + wanted <= most
        return True

    def live(self) -> list[Client]:
        return [client for client in self.clients.values() if client.ended is None]

    def abort(self, ids: list[int]) -> None:
        live = {client.request.id for client in self.live()}
        for id in live.intersection(ids):
            self.clients[id].aborted = True
        assert set(self.scheduler.abort(ids, "api_abort")) == live.intersection(ids), "abort returned wrong ids"

    def step(self) -> list[Fetch]:
        """Launch as many steps as possible, and perhaps land one; returns new fetches."""
        fetches: list[Fetch] = []
        while len(self.device) < self.depth and (plan := self._schedule()):
            fetches += plan.fetches
            if not plan.rows:
                break
            self.device.launch(plan)
            self.scheduler.check()
        if len(self.device) and (len(self.device) == self.depth or self.rng.random() < 0.7):
            self.scheduler.commit(self.land())
        return fetches

    def land(self) -> StepResult:
        """Return the device's result of a step, in which slices in lockstep have any number of tokens.

        Some of these slices break their grammar.
        """
        plan, sequences = self.scheduler._launched[0]
        sampling = [seq for seq, samples in zip(sequences, plan.samples, strict=True) if samples]
        lengths = [self.rng.choice((0, 1, 1, 2, 3)) if seq.lockstep else 1 for seq in sampling]
        result = self.device.land(lengths)
        owners = [seq for seq, length in zip(sampling, lengths, strict=True) for _ in range(length)]
        lost = [i for i, seq in enumerate(owners) if seq.lockstep and self.rng.random() < 0.03]
        for i in lost:
            result.tokens[i] = -1
            self.clients[owners[i].id].aborted = True
        return msgspec.structs.replace(result, lost=tuple(lost))

    def read_lease_events(self) -> None:
        """Apply lease events, as a transport does before a plan can touch lent blocks."""
        for news in self.scheduler.leases.take_news():
            match news:
                case Granted(lease):
                    self.lent[lease.id] = lease
                case Filled(id, blocks):
                    assert self.filled[id] <= blocks <= len(self.lent[id].blocks), "filled beyond the lease"
                    self.filled[id] = blocks
                case Withdrawn(id):
                    del self.lent[id]

    def _schedule(self) -> StepPlan | None:
        scheduler = self.scheduler
        fresh = [seq for seq in scheduler.waiting if seq.started_s is None]
        flow = scheduler.flow
        plan = scheduler.schedule()
        self.read_lease_events()
        if plan is not None:
            assert flow is not Flow.FROZEN, "scheduled while frozen"
            assert sum(plan.counts) <= scheduler.limits.max_batch_tokens and len(set(plan.rows)) == len(plan.rows)
        self._check_admission(fresh, flow)
        self._check_lockstep()
        if plan is None and flow is Flow.DRAIN and not (scheduler.running or scheduler.leaving or scheduler.leases):
            assert scheduler.drained, "draining left preempted sequences waiting"
        return plan

    def _check_admission(self, fresh: list[Sequence], flow: Flow) -> None:
        assert flow is Flow.RUN or all(seq.phase is Phase.WAITING for seq in fresh), "admitted while draining"
        for tenant in {seq.request.tenant for seq in fresh}:
            admitted = [s.order for s in fresh if s.phase is not Phase.WAITING and s.request.tenant == tenant]
            left = [s.order for s in fresh if s.phase is Phase.WAITING and s.request.tenant == tenant]
            assert not admitted or not left or max(admitted) < min(left), "out of order"

    def _check_lockstep(self) -> None:
        pending: set[Sequence] = set()
        for plan, sequences in self.scheduler._launched:
            assert pending.isdisjoint(sequences), "continued before its token was known"
            sampling = [seq for seq, samples in zip(sequences, plan.samples, strict=True) if samples]
            pending |= {seq for seq in sampling if seq.request.sampling.grammar}

    def pass_outputs(self, outputs: Outputs) -> list[tuple[Client, Ticket]]:
        """Pass outputs to the clients; returns the tickets among them."""
        tickets = [(self.clients[id], ticket) for id, ticket in outputs.tickets.items()]
        for id, token in zip(outputs.ids, outputs.tokens, strict=True):
            self.clients[id].receive_token(token, outputs.version)
        for id, scores in outputs.prompt_logprobs.items():
            self.clients[id].receive_scores(scores, outputs.version)
        for id, reports in outputs.routed.items():
            self.clients[id].receive_routed(reports, outputs.version)
        for id, vector in outputs.vectors.items():
            self.clients[id].receive_vector(vector, outputs.version)
        for ended in outputs.ended:
            self.clients[ended.id].receive_end(ended)
        return tickets

    def tick(self, now_s: float) -> None:
        for seq in self.scheduler.sequences.values():
            self.clients[seq.id].aborted |= seq.deadline_s <= now_s
        self.scheduler.tick(now_s)
        assert all(seq.deadline_s > now_s for seq in self.scheduler.sequences.values()), "outlived its deadline"
        assert all(lease.until_s > now_s for lease in self.scheduler.leases), "a lease outlived its deadline"

    def quiet(self) -> bool:
        s = self.scheduler
        return not (s.sequences or s._launched or s.leases or s.leaving)


class FuzzRun:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.windows = WINDOWS[seed // 4 % len(WINDOWS)] if seed // 2 % 2 else (None,)
        self.p, self.d = (Engine(name, self.rng, self.windows) for name in "PD")
        self.engines = (self.p, self.d)
        self.prefixes = [[self.rng.randrange(VOCAB_SIZE) for _ in range(24)] for _ in range(4)]
        self.fetches: list[Transfer] = []
        self.counts: Counter[str] = Counter()
        self.ids = iter(range(1, 10**9))
        self.now_s = 0.0
        self.readers = random.Random(seed + 1)
        self.weights_change = seed % 2 == 0
        self.tenants = (("",), ("a", "b", "c"), ("", "a"))[(seed + 2) % 3]

    def run(self, turns: int = 300) -> Counter[str]:
        for _ in range(turns):
            self.turn(live=True)
        for engine in self.engines:
            engine.scheduler.resume()
            engine.scheduler.suspend(engine.clients, suspended=False)
        for _ in range(turns * 5):
            if all(engine.quiet() for engine in self.engines) and not self.fetches:
                break
            self.turn(live=False)
        for engine in self.engines:
            self.deliver(engine)
        self.check_end()
        return self.counts

    def turn(self, *, live: bool) -> None:
        self.now_s += self.rng.choice([0, 0.1, 1])
        if live:
            self.disturb()
        for engine in self.engines:
            engine.tick(self.now_s)
            self.fetches += [Transfer(fetch) for fetch in engine.step()]
            self.release_unwanted_tickets(engine)
            self.deliver(engine)
            engine.scheduler.check()
        self.move_kv()
        self.end_pauses()

    # -- random events ----------------------------------------------------------

    def disturb(self) -> None:
        rng = self.rng
        if rng.random() < 0.5:
            self.add(rng.choice(self.engines))
        if rng.random() < 0.1:
            engine = rng.choice(self.engines)
            known = list(engine.clients) or [0]
            ids = [rng.choice(known) for _ in range(rng.randrange(1, 4))] + [10**9]
            self.deliver(engine)
            engine.abort(ids)
            self.counts["aborts"] += 1
        if rng.random() < 0.1:
            for engine in self.engines:  # preempted sequences with a step still in flight
                self.deliver(engine)
                engine.abort([seq.id for seq in engine.scheduler.leaving if seq.preempted])
        if rng.random() < 0.02:
            self.pause(rng.choice(self.engines), rng.choice([Flow.FROZEN, Flow.DRAIN]))
        if rng.random() < 0.02:
            for engine in self.engines:
                self.pause(engine, Flow.FROZEN)
        if rng.random() < 0.01:
            rng.choice(self.engines).scheduler.pool.flush()
        if rng.random() < 0.02:
            self.disturb_leases()
        if self.readers.random() < 0.2:
            self.stop_reading()

    def stop_reading(self) -> None:
        """Let some clients stop reading, and others read again."""
        engine, draw = self.readers.choice(self.engines), self.readers
        known = [*engine.clients, 10**9]
        engine.scheduler.suspend(draw.choices(known, k=3), suspended=draw.random() < 0.6)
        self.counts["suspended"] += any(seq.suspended for seq in engine.scheduler.running)

    def add(self, engine: Engine) -> None:
        rng = self.rng
        prompt = self.prompt(engine)
        max_tokens = rng.choice([None, *range(9)])
        free = rng.random() < 0.8
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, 0, 3 if max_tokens is None else min(3, max_tokens)]) if free else 0,
            ignore_eos=free and max_tokens is not None and rng.random() < 0.2,
            grammar=None if free else "start: /.*/",
            stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 2]))),
            prompt_logprobs=0 if rng.random() < (0.7 if max_tokens == 0 else 0.1) else None,
            prompt_logprobs_start=rng.choice([0, 0, 1, 9, len(prompt)]),
        )
        id = next(self.ids)
        # Experts are kept by the blocks of the first group, which then has no window.
        asks_for_experts = id % 3 == 0 and self.windows[0] is None
        sampling = msgspec.structs.replace(sampling, return_routed_experts=asks_for_experts)
        request = GenerateRequest(
            id,
            prompt,
            sampling,
            generated=self.generated_elsewhere(prompt, sampling) if max_tokens != 0 and rng.random() < 0.2 else (),
            priority=rng.choice([0, 0, 0, 1, -1]),
            timeout_s=rng.choice([None, None, None, None, 2.0, 30.0]),
            export_kv=engine is self.p and rng.random() < 0.7,
            tenant=self.tenants[id % len(self.tenants)],
        )
        if max_tokens == 0 and not request.export_kv:
            pooled: tuple[Pooling | None, ...] = ("last", "mean", None)
            request = msgspec.structs.replace(request, pooling=pooled[id % len(pooled)])
        self.counts["requests" if engine.offer(request) else "refused"] += 1

    def prompt(self, engine: Engine) -> tuple[int, ...]:
        """Return a new prompt, a prompt with a shared prefix, or the next turn of an earlier conversation."""
        rng = self.rng
        if engine.clients and rng.random() < 0.3:
            earlier = engine.clients[rng.choice(list(engine.clients)[-20:])]
            start = [*earlier.request.prompt, *earlier.request.generated, *earlier.tokens]
        else:
            start = rng.choice(self.prefixes)[: rng.randrange(25)]
        return (*start, *rng.choices(range(VOCAB_SIZE), k=rng.randrange(1, 7)))

    def generated_elsewhere(self, prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[int, ...]:
        answer: list[int] = []
        for _ in range(self.rng.randrange(1, (sampling.max_tokens or 8) + 1)):
            answer.append(expected_token([*prompt, *answer], 0, VOCAB_SIZE, self.windows))
            if answer[-1] in EOS or answer[-1] in sampling.stop_token_ids:
                break
        return tuple(answer)

    def pause(self, engine: Engine, flow: Flow) -> None:
        engine.scheduler.pause(flow)
        engine.resume_at = self.now_s + self.rng.choice([1, 5])
        self.counts[f"pause {flow.name.lower()}"] += 1

    def disturb_leases(self) -> None:
        """Renew leases: calls with a stale generation must be refused, and valid ones accepted."""
        table = self.p.scheduler.leases
        for lease in list(table):
            assert not table.renew(lease.id, lease.generation + 1, 1e9)
            self.p.scheduler.end_lease(lease.id, lease.generation + 1, fetched=True)
            assert table.find(lease.id, lease.generation) is lease, "a stale generation ended a lease"
            assert table.renew(lease.id, lease.generation, self.now_s + 25)

    def deliver(self, engine: Engine) -> None:
        for client, ticket in engine.pass_outputs(engine.scheduler.take_outputs()):
            # P computes the KV, D generates the answer.
            exported_request = client.request
            sampling = msgspec.structs.replace(
                exported_request.sampling, prompt_logprobs=0 if self.rng.random() < 0.1 else None, grammar=None
            )
            request = GenerateRequest(
                next(self.ids),
                exported_request.prompt,
                sampling,
                generated=exported_request.generated,
                ticket=self.damage(ticket),
            )
            self.counts["tickets"] += self.d.offer(request)

    def damage(self, ticket: Ticket) -> Ticket:
        wrong: dict[str, object] = {}
        if self.rng.random() < 0.1:
            wrong = {"key": b"?" * 16}
        elif self.rng.random() < 0.1:
            wrong = {"version": ticket.version + 1}
        elif self.rng.random() < 0.1:
            wrong = {"tokens": ticket.tokens + self.rng.randrange(-BLOCK_SIZE, BLOCK_SIZE)}
        return msgspec.structs.replace(ticket, **wrong)

    def release_unwanted_tickets(self, engine: Engine) -> None:
        unwanted, engine.scheduler.unwanted = engine.scheduler.unwanted, []
        for id in unwanted:
            ticket = engine.clients[id].request.ticket
            assert ticket is not None
            for transfer in self.fetches:
                transfer.wanted &= transfer.fetch.id != id
            self.p.scheduler.end_lease(ticket.lease, ticket.generation, fetched=False)

    def move_kv(self) -> None:
        """Advance transfers, which write in no order relative to steps, and may write garbage and then fail."""
        for transfer in list(self.fetches):
            if self.rng.random() < 0.5:
                self.advance(transfer)

    def advance(self, transfer: Transfer) -> None:
        """Copy the blocks that P has filled so far. The copy is valid only if the lease still exists after the last one."""
        fetch, ticket = transfer.fetch, transfer.fetch.ticket
        lease = self.p.lent.get(ticket.lease)
        if lease is None or not transfer.wanted or self.rng.random() < 0.05:
            return self.land_fetch(transfer, ok=False)
        ready = self.p.filled[lease.id] - fetch.skip
        for i in range(transfer.copied, min(ready, len(fetch.blocks))):
            self.d.device.kv[fetch.blocks[i]][:] = self.p.device.kv[lease.blocks[fetch.skip + i]]
            transfer.copied = i + 1
        if transfer.copied == len(fetch.blocks):
            return self.land_fetch(transfer, ok=True)
        return None

    def land_fetch(self, transfer: Transfer, *, ok: bool) -> None:
        self.fetches.remove(transfer)
        fetch, ticket = transfer.fetch, transfer.fetch.ticket
        for block in () if ok else fetch.blocks:
            self.d.device.kv[block][:] = [-7] * BLOCK_SIZE
        self.d.scheduler.transfer_done(fetch.id, ok)
        self.d.scheduler.check()
        self.p.scheduler.end_lease(ticket.lease, ticket.generation, fetched=ok)
        self.p.scheduler.check()
        self.counts["transfers" if ok else "transfers lost"] += 1

    def end_pauses(self) -> None:
        if self.weights_change and all(engine.scheduler.quiesced for engine in self.engines):
            self.change_weights()
        for engine in self.engines:
            if self.now_s >= engine.resume_at:
                self.sleep(engine)
                engine.scheduler.resume()

    def sleep(self, engine: Engine) -> None:
        """Lose all KV, unless some of it is leased or being transferred."""
        if engine.scheduler.quiesced and not engine.scheduler.lends_kv and self.rng.random() < 0.3:
            engine.device.forget()
            engine.scheduler.kv_lost()
            engine.scheduler.check()
            self.counts["sleeps"] += 1

    def change_weights(self) -> None:
        """Update both engines to the same version, so that tickets between them stay valid."""
        recompute = self.rng.random() < 0.5
        for engine in self.engines:
            assert not len(engine.device), "quiesced with steps on the device"
            self.deliver(engine)
            if not recompute:
                for seq in engine.scheduler.running:
                    engine.clients[seq.id].checkable = False
            engine.device.version += 1
            engine.scheduler.weights_changed(engine.device.version, recompute=recompute)
            engine.scheduler.check()
        self.counts["weights changed"] += 1

    # -- checks at the end ------------------------------------------------------

    def check_end(self) -> None:
        for engine in self.engines:
            scheduler = engine.scheduler
            assert engine.quiet() and not self.fetches, f"{engine.name} never became idle: {scheduler!r}"
            assert scheduler.pool.available == scheduler.pool.num_blocks, "blocks leaked"
            assert scheduler.next_deadline_s == inf and not scheduler.fetches
            engine.read_lease_events()
            assert not engine.lent, "a lease was never withdrawn"
            assert all(client.ended is not None for client in engine.clients.values())
            self.counts["tokens"] += sum(len(client.tokens) for client in engine.clients.values())
            self.counts["preemptions"] += scheduler.counters.preemptions
            self.counts["cached tokens"] += scheduler.counters.cached_tokens
            for client in engine.clients.values():
                self.counts[f"ended by {client.ended.cause}"] += 1  # type: ignore[union-attr]


def main(first: int, last: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(first, last):
        try:
            total += FuzzRun(seed).run()
        except AssertionError:
            print(f"seed {seed}", file=sys.stderr)
            raise
    print(f"{last - first} seeds passed:", ", ".join(f"{count} {what}" for what, count in sorted(total.items())))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
