"""The scheduler: decides what runs next, and owns every sequence, block, row and lease.

The central idea: each step moves a sequence's `computed` count towards the number of tokens it has. Prefill, chunked
prefill, decode, prefix hits, preemption, transfers, recomputation after new weights and resuming another engine's
answer differ only in where `computed` starts.

Rules: one thread, no clock (`tick` sets the time), no I/O. Admission never preempts. A sequence leaves the engine
only through `_finish`, and its resources are released only by `_release`: blocks at once where the order of steps
makes that safe, a row when the last step that uses it has landed. Tenants share rows and blocks: the next sequence
admitted belongs to the tenant with the fewest rows, and no tenant can take the last rows or blocks
(docs/decisions/0014-tenants-share-an-engine.md).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count, repeat
from math import inf

from headgate.core.admission import AdmissionChecks
from headgate.core.blocks import BlockPool
from headgate.core.draft import StepDraft
from headgate.core.fetches import FetchTable
from headgate.core.leases import LeaseTable
from headgate.core.limits import SchedulerLimits
from headgate.core.queue import DeadlineQueue, FairQueue, Rank
from headgate.core.rows import RowPool
from headgate.core.sequence import Phase, Sequence
from headgate.errors import DuplicateId
from headgate.protocol.groups import ABSENT, group_keys, present
from headgate.protocol.output import Cause, FinishReason, Outputs
from headgate.protocol.plan import Logprobs, StepPlan, StepResult
from headgate.protocol.request import GenerateRequest, Ticket

FETCHED: tuple[FinishReason, Cause] = ("stop", "exported")
LENGTH: tuple[FinishReason, Cause] = ("length", "max_tokens")
LOST: tuple[FinishReason, Cause] = ("abort", "transfer_failed")
# Compared with every running sequence in every step: looking up a global costs a tenth of looking up an Enum member.
RUNNING = Phase.RUNNING


class Flow(Enum):
    """Which sequences may be scheduled."""

    RUN = auto()
    DRAIN = auto()  # only sequences that have already started
    FROZEN = auto()  # nothing


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    preemptions: int = 0
    prompt_tokens: int = 0  # tokens of admitted sequences; all are looked up in the prefix cache
    cached_tokens: int = 0  # those of `prompt_tokens` that the prefix cache had
    output_tokens: int = 0  # tokens generated, delivered or not
    leases_expired: int = 0
    transfers: int = 0
    transfers_lost: int = 0  # each became a local prefill
    rescheduled: int = 0


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        *,
        version: int = 0,
        draw_lease_id: Callable[[], int] | None = None,
    ) -> None:
        self.pool = pool
        self.limits = limits
        self.version = version
        self.flow = Flow.RUN
        self.counters = SchedulerCounters()
        self.sequences: dict[int, Sequence] = {}
        self.waiting = FairQueue()
        self.running: dict[Sequence, None] = {}  # sequences in RUNNING or LOADING, in order of admission
        self.leaving: set[Sequence] = set()  # finished or preempted sequences that still own a row or blocks
        self.leases = LeaseTable(limits.generation, draw_lease_id or count(1).__next__)
        self.unwanted: list[int] = []  # sequences that no longer need the KV of their ticket; the loop empties it
        self.now_s = 0.0
        self._deadlines = DeadlineQueue()
        self._rows = RowPool(limits.max_running)
        self.admission = AdmissionChecks(limits, pool, self._rows.shares)
        self.max_context = self.admission.max_context
        self._groups = pool.groups
        self._windowed = pool.groups.windowed
        self._fetches = FetchTable(pool.groups)
        self._launched: deque[tuple[StepPlan, list[Sequence]]] = deque()
        self._drafting = False
        self._evicted: list[Sequence] = []  # evicted while a step was drafted; released after the draft
        self._outbox = Outputs(version)
        self._arrivals, self._steps = count(), count()

    def __repr__(self) -> str:
        return f"<Scheduler {len(self.running)} running, {len(self.waiting)} waiting, {self.pool!r}>"

    # -- requests ---------------------------------------------------------------

    def add(self, request: GenerateRequest) -> None:
        """Accept a request, or raise a RequestError that says why it can never run."""
        if request.id in self.sequences:
            raise DuplicateId(f"request {request.id} is already running")
        seq = self.admission.new_sequence(request, next(self._arrivals), self.now_s)
        self.sequences[seq.id] = seq
        self.waiting.add(self._rank(seq), seq)
        self._deadlines.add(seq)
        self._finish_if_done(seq)

    def abort(self, ids: Iterable[int], cause: Cause) -> list[int]:
        """End these sequences with the tokens they have; returns the ids that were live."""
        live = [id for id in ids if id in self.sequences]
        reason: FinishReason = "pd_reschedule" if cause == "shutdown" and self.limits.reschedules else "abort"
        for id in live:
            # An id may be given twice.
            if seq := self.sequences.get(id):
                self._finish(seq, "abort" if seq.exports else reason, cause)
        return live

    def suspend(self, ids: Iterable[int], *, suspended: bool) -> None:
        """Stop or continue computing these sequences. Launched steps still land; a drain computes all sequences."""
        for id in ids:
            if seq := self.sequences.get(id):
                seq.suspended = suspended

    def has_any(self, ids: Collection[int]) -> bool:
        """Whether one of these sequences is live, or has ended and still owns a row or blocks."""
        return any(id in self.sequences for id in ids) or any(seq.id in ids for seq in self.leaving)

    def end_lease(self, id: int, generation: int, *, fetched: bool) -> None:
        """End a lease and its sequence, because another engine has fetched the KV or never will."""
        if lease := self.leases.find(id, generation):
            reason, cause = FETCHED if fetched else LOST
            self._finish(self.sequences[lease.sequence], reason, cause)

    def take_outputs(self) -> Outputs:
        outputs, self._outbox = self._outbox, Outputs(self.version)
        return outputs

    # -- the step ---------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Set the time, and end sequences and leases that are overdue."""
        self.now_s = self.pool.now_s = now_s
        while (seq := self._deadlines.overdue(now_s)) is not None:
            self._finish(seq, "abort", "capacity" if seq.exports and seq.phase is Phase.WAITING else "deadline")
        for lease in self.leases.overdue(now_s):
            self.counters.leases_expired += 1
            self.end_lease(lease.id, lease.generation, fetched=False)

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if nothing can run. A plan without rows only fetches KV and needs no commit."""
        if self.flow is Flow.FROZEN:
            return None
        draft, plan = self._draft(), None
        if draft.rows or draft.fetches:
            plan = draft.plan(next(self._steps), self.version)
            if draft.rows:
                self._launched.append((plan, draft.sequences))
        if self._windowed:
            for seq in draft.sequences:
                self._give_back(seq, seq.computed)
        self._release_evicted()
        return plan

    def _draft(self) -> StepDraft:
        draft = StepDraft(self.limits.max_batch_tokens, len(self._groups))
        self._drafting = True
        self._continue_running(draft)
        self._admit_waiting(draft)
        if self._fetches.waiting:
            draft.fetches += self._fetches.start_ready()
        self._drafting = False
        return draft

    def _continue_running(self, draft: StepDraft) -> None:
        # A copy, because covering one sequence may preempt another.
        for seq in list(self.running):
            if draft.budget == 0:
                return
            if seq.suspended and self.flow is Flow.RUN:
                continue
            if seq.phase is RUNNING and (todo := seq.todo) > 0:
                todo = min(todo, draft.budget)
                if self._cover(seq, seq.computed + todo):
                    self._add_slice(draft, seq, todo)

    def _admit_waiting(self, draft: StepDraft) -> None:
        while self._rows.free and draft.budget and (seq := self._next_waiting()) is not None:
            if not self._admit(seq):
                return
            if seq.phase is Phase.LOADING:
                self._fetches.waiting[seq] = None
            else:
                self._add_slice(draft, seq, min(seq.todo, draft.budget))

    def _next_waiting(self) -> Sequence | None:
        """Return the next sequence of the tenant that has the fewest rows, among tenants that may have more."""
        held = self._rows.shares.held
        fronts = sorted(self.waiting.fronts(), key=lambda seq: (held[seq.request.tenant], self._rank(seq)))
        return next(filter(self._may_start, fronts), None)  # lazy: stops at the first that may start

    def _may_start(self, seq: Sequence) -> bool:
        if seq.holds or (self.flow is Flow.DRAIN and not seq.preempted):
            return False
        return not seq.request.tenant or self.admission.within_share(seq, self.running, self.version)

    def commit(self, result: StepResult) -> None:
        """Process the result of the oldest launched step, which has landed."""
        plan, sequences = self._launched.popleft()
        assert plan.step == result.step, f"step {result.step} landed before step {plan.step}"
        if self._fetches.touched:
            self._fetches.step_landed(plan.step)
        tokens, logprobs, lost = result.tokens, result.logprobs, result.lost
        lengths, last, routed = iter(result.lengths or repeat(1)), 0, result.routed
        for i, (seq, samples) in enumerate(zip(sequences, plan.samples, strict=True)):
            first = last
            if samples:
                last += next(lengths)
            seq.holds -= 1
            seq.sampling -= samples
            if seq.phase is not RUNNING:
                # Aborted or preempted while the step ran: the step's tokens are dropped.
                self._release(seq)
                continue
            if scores := result.prompt_logprobs.get(i):
                self._report_scores(seq, plan.starts[i], scores)
            if routed and (experts := routed.get(i)):
                self._outbox.routed[seq.id] = (*self._outbox.routed.get(seq.id, ()), experts)
            if seq.lease is not None:
                # Steps land in order, so the blocks that this sequence found in the cache are written too.
                full = (plan.starts[i] + plan.counts[i]) // self.pool.block_size
                self.leases.fill(seq.lease, self._groups.count_for(seq.limit - 1, full))
            if last == first + 1 and not lost:  # the common case
                self._append(seq, tokens[first], logprobs.get(first))
            elif samples:
                self._accept_run(seq, result, first, last)
            elif seq.prompt_only and plan.starts[i] + plan.counts[i] == seq.wanted:
                if seq.pooled:
                    self._outbox.vectors[seq.id] = result.vectors[i]
                self._finish(seq, *LENGTH)

    @property
    def next_deadline_s(self) -> float:
        """The earliest deadline of a sequence or lease, at which `tick` will end it."""
        return min(self._deadlines.next_s, *(lease.until_s for lease in self.leases), inf)

    # -- transfers --------------------------------------------------------------

    @property
    def fetches(self) -> int:
        """The number of fetches under way, including those whose sequences no longer need the KV."""
        return len(self._fetches)

    def transfer_done(self, id: int, ok: bool) -> None:
        """Process the end of the fetch for sequence `id`, which has filled its blocks (`ok`) or failed."""
        seq = self._fetches.end(id)
        ticket, seq.ticket = seq.ticket, None
        if seq.phase is not Phase.LOADING:
            self._release(seq)
            return
        seq.phase = Phase.RUNNING
        if ok and ticket is not None and ticket.version == self.version:
            # The last token is computed here, because a slice needs at least one.
            seq.computed = max(seq.computed, min(ticket.tokens, seq.wanted - 1))
            self._give_back(seq, ticket.tokens)  # the blocks that were not fetched, because no window needs them
            self.counters.transfers += 1
        else:
            self.counters.transfers_lost += 1  # a lost transfer becomes a local prefill

    # -- pauses and new weights -------------------------------------------------

    def pause(self, flow: Flow) -> None:
        self.flow = flow

    def resume(self) -> None:
        self.flow = Flow.RUN

    @property
    def quiesced(self) -> bool:
        """Whether no step is on the device and none will be launched."""
        return self.flow is Flow.FROZEN and not self._launched

    @property
    def drained(self) -> bool:
        """Whether every sequence that had started has ended."""
        return not (self.running or any(seq.preempted for seq in self.waiting.fronts()))

    def weights_changed(self, version: int, *, recompute: bool) -> None:
        """Switch to weights `version`, for new cache keys and tokens. The cache no longer finds KV of old weights."""
        assert self.quiesced and not self._outbox
        self.version = self._outbox.version = version
        self.pool.move_horizon()
        for seq in list(self.running):
            seq.pure = False
            if seq.exports:
                self._finish(seq, "abort", "weights")
        if recompute:
            for seq in list(self.running):
                self._preempt(seq)

    @property
    def lends_kv(self) -> bool:
        """Whether blocks are in use by a lease, a transfer, or a sequence that is no longer running."""
        return bool(self.leases or self._fetches or self.leaving)

    def kv_lost(self) -> None:
        """Forget all KV, because its memory is released. Running sequences keep their tokens and recompute them."""
        assert self.quiesced and not self.lends_kv
        for seq in list(self.running):
            self._preempt(seq)
        self.pool.flush()

    # -- admission --------------------------------------------------------------

    def _rank(self, seq: Sequence) -> Rank:
        """Sort key: sequences that have started come first; then by priority, due time and arrival."""
        return (seq.started_s is None, *seq.order)

    def _admit(self, seq: Sequence) -> bool:
        """Give `seq` a row and blocks for all its tokens. If there are too few, change nothing and return False."""
        room = self.admission.find_room(seq, len(self.running), self.version)
        if room is None:
            return False
        self.waiting.remove(self._rank(seq), seq)
        self.running[seq] = None
        self.pool.retain(present(room.hit))
        seq.blocks = list(room.hit)
        seq.stripes = seq.found = seq.published = len(room.hit) // len(self._groups)
        seq.computed = seq.passed = seq.found * self.pool.block_size
        self._allocate(seq, room.stripes, self._groups.stripes_for(seq.wanted))
        seq.row = self._rows.take(seq.request.tenant)
        seq.phase = Phase.LOADING if room.fetches else Phase.RUNNING
        if seq.phase is Phase.RUNNING:
            self._drop_ticket(seq)
        if seq.exports:
            self._lend(seq)
        self._note_admission(seq)
        return True

    def _drop_ticket(self, seq: Sequence) -> None:
        """Give up the ticket of `seq`. A fetch under way is cancelled; `transfer_done` still reports its end."""
        if seq.ticket is not None:
            self.unwanted.append(seq.id)
            seq.ticket = None

    def _lend(self, seq: Sequence) -> None:
        """Lease the KV of `seq` to another engine, which may fetch each block as soon as it is computed."""
        tokens, until_s = seq.limit - 1, self.now_s + self.limits.lease_s
        lease = self.leases.grant(seq.id, self.version, self._lent_blocks(seq), until_s)
        seq.lease = lease.id
        self._deadlines.remove(seq)  # the limit on waiting no longer applies; the request's own timeout does
        seq.deadline_s = inf if seq.request.timeout_s is None else seq.arrived_s + seq.request.timeout_s
        self._deadlines.add(seq)
        key = self._keys(seq, self._groups.stripes_for(tokens))[-1]
        ticket = Ticket(self.limits.engine, lease.id, lease.generation, tokens, self.version, key)
        self._outbox.tickets[seq.id] = ticket

    def _lent_blocks(self, seq: Sequence) -> tuple[int, ...]:
        """The blocks of an export that another engine needs to continue after it."""
        tokens = seq.limit - 1
        places = self._groups.places_for(tokens, self._groups.stripes_for(tokens))
        return tuple(seq.blocks[place] for place in places)

    def _note_admission(self, seq: Sequence) -> None:
        if seq.started_s is None:
            seq.started_s, seq.cached_tokens = self.now_s, seq.computed
        self.counters.prompt_tokens += len(seq.tokens)
        self.counters.cached_tokens += seq.computed

    # -- progress ---------------------------------------------------------------

    def _cover(self, seq: Sequence, tokens: int) -> bool:
        """Give `seq` blocks for its first `tokens` tokens; returns whether it has them.

        If too few blocks are available, sequences are preempted, possibly `seq` itself.
        """
        stripes = self._groups.stripes_for(tokens)
        if stripes <= seq.stripes:
            return True
        need = len(self._groups.lacking(seq.blocks, seq.stripes, stripes, stripes))
        while need > self.pool.available:
            if self.returning:
                return False  # blocks are about to be released; wait for them
            victim = self._victim()
            self._evict(victim)
            if victim is seq:
                return False
        self._allocate(seq, stripes, stripes)
        return True

    def _allocate(self, seq: Sequence, stripes: int, whole: int) -> None:
        """Complete the first `stripes` stripes of `seq`; groups without a window get blocks of the first `whole`."""
        places = self._groups.lacking(seq.blocks, seq.stripes, stripes, whole)
        blocks = self.pool.allocate(len(places))
        if self._windowed:
            seq.blocks += [ABSENT] * (whole * len(self._groups) - len(seq.blocks))
            for place, block in zip(places, blocks, strict=True):
                seq.blocks[place] = block
        else:
            seq.blocks += blocks
        seq.own += len(blocks)
        seq.stripes = stripes

    def _give_back(self, seq: Sequence, position: int) -> None:
        """Release the blocks of `seq` that no window needs at `position`; not within a draft, which may contain `seq`."""
        if position <= seq.passed:
            return
        places, seq.passed = self._groups.passed(seq.passed, position), position
        blocks = [seq.blocks[place] for place in places]
        for place in places:
            seq.blocks[place] = ABSENT
        seq.own -= sum(place >= seq.found * len(self._groups) for place in places)
        self._release_to_pool(seq, blocks)

    def _victim(self) -> Sequence:
        """Return the sequence to preempt: the last in `order`, of the tenant that owns the most blocks.

        A tenant with one sequence is spared unless all tenants have only one, so that the first in order continues.
        """
        owned: Counter[str] = Counter()
        count: Counter[str] = Counter()
        for seq in self.running:
            owned[seq.request.tenant] += seq.own
            count[seq.request.tenant] += 1
        return max(
            self.running,
            key=lambda seq: (owned[seq.request.tenant] if count[seq.request.tenant] > 1 else 0, seq.order),
        )

    def _add_slice(self, draft: StepDraft, seq: Sequence, count: int) -> None:
        start = seq.computed
        seq.computed = end = start + count
        seq.holds += 1
        samples = end == len(seq.tokens) + seq.sampling and not seq.pooled
        seq.sampling += samples
        draft.add_slice(seq, start, count, samples)
        self._publish(seq)

    def _accept_run(self, seq: Sequence, result: StepResult, first: int, last: int) -> None:
        """Append tokens `first` to `last - 1` of a result to `seq`, up to the token that ends the answer."""
        assert last - first == 1 or not seq.sampling, "a later step was planned for the position after one token"
        if first == last:
            seq.computed -= 1  # nothing was sampled: compute the last token again, because sampling needs it
        for index in range(first, last):
            if index in result.lost:
                self._finish(seq, "abort", "grammar")
            else:
                self._append(seq, result.tokens[index], result.logprobs.get(index))
            if seq.phase is Phase.FINISHED:
                return

    def _append(self, seq: Sequence, token: int, logprobs: Logprobs | None) -> None:
        outbox = self._outbox
        if logprobs is not None:
            outbox.logprobs[len(outbox.tokens)] = logprobs
        outbox.ids.append(seq.request.id)
        outbox.tokens.append(token)
        seq.tokens.append(token)
        self.counters.output_tokens += 1
        if seq.first_token_s is None:
            seq.first_token_s = self.now_s
        if token in seq.stops or len(seq.tokens) >= seq.limit:
            self._finish_if_done(seq)

    def _finish_if_done(self, seq: Sequence) -> None:
        if seq.limit == 1:
            # There is nothing to compute: no whole block to export, or no prompt token to score.
            self._finish(seq, *(FETCHED if seq.exports else LENGTH))
        elif seq.exports or not seq.output_len:
            return
        elif (cause := seq.stops.get(seq.tokens[-1])) and seq.output_len > seq.request.sampling.min_tokens:
            self._finish(seq, "stop", cause)
        elif len(seq.tokens) >= seq.limit:
            self._finish(seq, *LENGTH)

    def _report_scores(self, seq: Sequence, start: int, scores: tuple[Logprobs, ...]) -> None:
        """Output the log-probabilities that the slice at `start` has computed, once for each prompt position."""
        first = max(start + 1, seq.request.sampling.prompt_logprobs_start)
        fresh = scores[max(0, seq.scored - first) :]
        reported = self._outbox.prompt_logprobs.get(seq.id, ())
        self._outbox.prompt_logprobs[seq.id] = reported + fresh
        seq.scored += len(fresh)

    def _publish(self, seq: Sequence) -> None:
        """Publish full blocks in the prefix cache. Steps run in order, so others read them after they are written."""
        full = min(seq.computed, len(seq.tokens)) // self.pool.block_size
        if full <= seq.published or not seq.pure:
            return
        keys, count = self._keys(seq, full)[seq.published :], len(self._groups)
        blocks = seq.blocks[seq.published * count : full * count]
        for block, key in zip(blocks, group_keys(keys, count), strict=True):
            if block != ABSENT:
                self.pool.publish(block, key)
        seq.published = full

    def _keys(self, seq: Sequence, count: int) -> list[bytes]:
        return seq.keys(count, version=self.version, block_size=self.pool.block_size)

    # -- the end of a sequence, and preemption ----------------------------------

    def _finish(self, seq: Sequence, reason: FinishReason, cause: Cause) -> None:
        if seq.phase is not Phase.WAITING:  # a waiting sequence has no blocks, though its steps may be in flight
            self._publish(seq)
        self._dequeue(seq)
        self._drop_ticket(seq)
        if seq.lease is not None:
            self.leases.end(seq.lease)
            seq.lease = None
        self.counters.rescheduled += reason == "pd_reschedule"
        seq.phase = Phase.FINISHED
        del self.sequences[seq.id]
        self._deadlines.remove(seq)
        self._outbox.ended.append(seq.terminal_output(reason, cause, self.now_s))
        self._release(seq)

    def _evict(self, seq: Sequence) -> None:
        """Take the blocks of `seq`: end it if it is an export or may resume in another engine, else preempt it."""
        if seq.exports:
            self._finish(seq, "abort", "preempted")
        elif self.limits.reschedules and not seq.request.recompute:
            self._finish(seq, "pd_reschedule", "preempted")
        else:
            self._preempt(seq)

    def _preempt(self, seq: Sequence) -> None:
        self.counters.preemptions += 1
        self._dequeue(seq)
        self._drop_ticket(seq)
        seq.phase = Phase.WAITING
        self.waiting.add(self._rank(seq), seq)
        self._release(seq)

    def _dequeue(self, seq: Sequence) -> None:
        if seq.phase is Phase.WAITING:
            self.waiting.remove(self._rank(seq), seq)
        else:
            del self.running[seq]
            self._fetches.waiting.pop(seq, None)

    def _release(self, seq: Sequence) -> None:
        """Take back what `seq` owns: its blocks now if that is safe, its row when its last step has landed."""
        if seq.holds and self._drafting:
            # The draft may contain `seq`, and no other sequence may write its blocks in the same step.
            self._evicted.append(seq)
        elif not self._fetches.fills(seq):
            self._release_blocks(seq)
        if seq.holds:
            self.leaving.add(seq)
            return
        self.leaving.discard(seq)
        if seq.row >= 0:
            self._rows.give_back(seq.row, seq.request.tenant)
            seq.disown()

    def _release_blocks(self, seq: Sequence) -> None:
        blocks, seq.blocks = seq.blocks, []
        self._release_to_pool(seq, present(blocks))

    def _release_to_pool(self, seq: Sequence, blocks: list[int]) -> None:
        """Release blocks of `seq`. Steps run in order, so their next owner writes them after those of `seq`."""
        self.pool.release(blocks)
        if blocks and seq.holds:
            last, _ = self._launched[-1]
            self._fetches.touched.append((last.step, blocks))

    def _release_evicted(self) -> None:
        evicted, self._evicted = self._evicted, []
        for seq in evicted:
            self._release(seq)

    @property
    def returning(self) -> list[Sequence]:
        """Sequences that have ended or were preempted, whose blocks a transfer or the drafted step still uses."""
        return [seq for seq in self.leaving if seq.blocks]

    # -- self-check -------------------------------------------------------------

    def check(self) -> None:
        """Assert the invariants of the scheduler's state; cheap enough to run whenever the engine is idle."""
        self.pool.check(self._holders())
        self._rows.check([*self.running, *self.leaving])
        assert {*self.running, *self.waiting} == set(self.sequences.values())
        lent = {seq.id: self._lent_blocks(seq) for seq in self.running if seq.lease is not None}
        assert lent == {lease.sequence: lease.blocks for lease in self.leases}
        for seq in self.sequences.values():
            self._check_sequence(seq)
        for seq in self.running:
            self._check_windows(seq)

    def _check_sequence(self, seq: Sequence) -> None:
        assert seq in self.running if seq.phase in (Phase.LOADING, Phase.RUNNING) else seq not in self.running
        assert seq.phase is not Phase.FINISHED
        assert seq in self.leaving or seq.computed <= len(seq.tokens) + seq.sampling
        assert seq.phase is not Phase.WAITING or seq in self.leaving or not (seq.blocks or seq.holds)

    def _check_windows(self, seq: Sequence) -> None:
        """Assert that `seq` holds what its next token needs, and nothing else."""
        groups, ahead = self._groups, range(seq.stripes * len(self._groups), len(seq.blocks))
        held = [place for place, block in enumerate(seq.blocks) if block != ABSENT]
        promised = [place for place in ahead if groups.windows[place % len(groups)] is None]
        assert held == groups.places_for(seq.passed, seq.stripes) + promised
        for group, window in enumerate(groups.windows):
            if window is not None:
                read = max(0, seq.computed + 1 - window) // groups.block_size
                assert groups.first_needed(group, seq.passed) <= read, "a block was given back too early"

    def _holders(self) -> Mapping[int, int]:
        holders: Counter[int] = Counter()
        for seq in {*self.running, *self.leaving}:
            holders.update(present(seq.blocks))
        return holders
