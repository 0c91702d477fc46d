"""The scheduler: decides what runs next, and owns every sequence, block, row and lease while it does.

One idea: a sequence has `computed` tokens and catches up with what is known of it. Prefill, chunked prefill, decode, prefix
hits, preemption, transfers, recomputation after new weights and resuming another engine's answer are this idea with
different starting points.

Rules: one thread, no clock (`tick` tells the time), no I/O. Admission never preempts. There is one way out of the engine
(`_finish`) and one way for resources to come home (`_release`): blocks at once where steps keep the order, rows when the
last step that has them has landed. Tenants share rows and blocks: the next one admitted is of the tenant that has the
fewest rows, and no tenant can take the last ones (docs/decisions/0014-tenants-share-an-engine.md).
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count, repeat
from math import inf

from headgate.core.blocks import BlockPool
from headgate.core.draft import StepDraft
from headgate.core.leases import LeaseTable
from headgate.core.queue import FairQueue, OrderedQueue, Rank
from headgate.core.sequence import Phase, Sequence
from headgate.errors import ContextTooLong, DuplicateId, RequestError
from headgate.protocol.keys import largest
from headgate.protocol.output import Cause, Ended, FinishReason, Outputs, Timings
from headgate.protocol.plan import Fetch, Logprobs, StepPlan, StepResult
from headgate.protocol.request import GenerateRequest, Ticket
from headgate.shares import FACTOR, Shares

FETCHED: tuple[FinishReason, Cause] = ("stop", "exported")
LOST: tuple[FinishReason, Cause] = ("abort", "transfer_failed")


class Flow(Enum):
    """What may be scheduled."""

    RUN = auto()
    DRAIN = auto()  # only what has already started
    FROZEN = auto()  # nothing


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the scheduler may hand out."""

    max_context: int  # tokens of one sequence
    max_running: int  # device rows
    max_batch_tokens: int  # tokens of one step
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    exports: bool = True  # others can fetch KV from us
    takes_grammars: bool = True  # the device can hold an answer to one
    patience_s: float = 60.0  # a request without a deadline queues as if it had to be done by then
    lease_s: float = 30.0  # how long KV is kept for an engine that says nothing
    export_wait_s: float = 30.0  # how long a request to export KV may wait for room
    reschedules: bool = False  # what would be preempted is given back to be resumed elsewhere
    engine: str = "local"  # how tickets name us
    generation: int = 0  # tells our leases from those of an earlier life


@dataclass(slots=True)
class SchedulerCounters:
    """What has happened so far; only ever grows."""

    preemptions: int = 0
    prompt_tokens: int = 0  # of admitted sequences, looked up in the prefix cache
    cached_tokens: int = 0  # of those, found there
    output_tokens: int = 0  # told, whoever hears them
    leases_expired: int = 0
    transfers: int = 0
    transfers_lost: int = 0  # each of them became a local prefill
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
        self.running: dict[Sequence, None] = {}  # RUNNING and LOADING, in order of admission
        self.leaving: set[Sequence] = set()  # finished or preempted, and not yet rid of all they owned
        self.leases = LeaseTable(limits.generation, draw_lease_id or count(1).__next__)
        self.unwanted: list[int] = []  # sequences that no longer want the KV their ticket names; the loop empties it
        self.now_s = 0.0
        self._deadlines = OrderedQueue()
        self._free_rows = list(reversed(range(limits.max_running)))
        self._rows = Shares(limits.max_running)  # the others
        self._launched: deque[tuple[StepPlan, list[Sequence]]] = deque()
        self._drafting = False
        self._evicted: list[Sequence] = []  # while a step was drafted
        self._touched: deque[tuple[int, list[int]]] = deque()  # blocks let go, and the last step that touches them
        self._unfetched: dict[Sequence, None] = {}  # LOADING, and nothing fills their blocks yet
        self._fetching: dict[int, Sequence] = {}
        self._outbox = Outputs(version)
        self._arrivals, self._steps = count(), count()

    def __repr__(self) -> str:
        return f"<Scheduler {len(self.running)} running, {len(self.waiting)} waiting, {self.pool!r}>"

    # -- what clients may ask ---------------------------------------------------

    def add(self, request: GenerateRequest) -> None:
        """Accept a request, or raise a RequestError that says why it can never run."""
        seq = self._new_sequence(request)
        self.sequences[seq.id] = seq
        self.waiting.add(self._rank(seq), seq)
        self._watch(seq)
        self._finish_if_done(seq)

    def abort(self, ids: Iterable[int], cause: Cause) -> list[int]:
        """End these sequences where they are; returns the ids that were live."""
        live = [id for id in ids if id in self.sequences]
        reason: FinishReason = "pd_reschedule" if cause == "shutdown" and self.limits.reschedules else "abort"
        for id in live:
            # An id given twice is aborted once.
            if seq := self.sequences.get(id):
                self._finish(seq, "abort" if seq.exports else reason, cause)
        return live

    def suspend(self, ids: Iterable[int], *, suspended: bool) -> None:
        """Compute no tokens for these sequences, or go on. What was launched still lands. A drain computes them all."""
        for id in ids:
            if seq := self.sequences.get(id):
                seq.suspended = suspended

    def has_any(self, ids: Collection[int]) -> bool:
        """Whether one of these sequences is live, or gone but not yet rid of all it owned."""
        return any(id in self.sequences for id in ids) or any(seq.id in ids for seq in self.leaving)

    def end_lease(self, id: int, generation: int, *, fetched: bool) -> None:
        """Another engine has fetched the KV of a lease, or never will."""
        if lease := self.leases.find(id, generation):
            reason, cause = FETCHED if fetched else LOST
            self._finish(self.sequences[lease.sequence], reason, cause)

    def take_outputs(self) -> Outputs:
        outputs, self._outbox = self._outbox, Outputs(self.version)
        return outputs

    # -- the step ---------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Tell the time, and end what is overdue."""
        self.now_s = self.pool.now_s = now_s
        while self._deadlines and self._deadlines.front().deadline_s <= now_s:
            seq = self._deadlines.front()
            self._finish(seq, "abort", "capacity" if seq.exports and seq.phase is Phase.WAITING else "deadline")
        for lease in self.leases.overdue(now_s):
            self.counters.leases_expired += 1
            self.end_lease(lease.id, lease.generation, fetched=False)

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run. A plan without rows only fetches and needs no commit."""
        if self.flow is Flow.FROZEN:
            return None
        draft, plan = self._draft(), None
        if draft.rows or draft.fetches:
            plan = draft.plan(next(self._steps), self.version)
            if draft.rows:
                self._launched.append((plan, draft.sequences))
        self._release_evicted()
        return plan

    def _draft(self) -> StepDraft:
        draft = StepDraft(self.limits.max_batch_tokens)
        self._drafting = True
        self._continue_running(draft)
        self._admit_waiting(draft)
        self._begin_fetches(draft)
        self._drafting = False
        return draft

    def _continue_running(self, draft: StepDraft) -> None:
        # A copy, because covering one sequence may preempt another.
        for seq in list(self.running):
            if draft.budget == 0:
                return
            if seq.suspended and self.flow is Flow.RUN:
                continue
            if seq.phase is Phase.RUNNING and (todo := seq.todo) > 0:
                todo = min(todo, draft.budget)
                if self._cover(seq, seq.computed + todo):
                    self._add_slice(draft, seq, todo)

    def _admit_waiting(self, draft: StepDraft) -> None:
        while self._free_rows and draft.budget and (seq := self._next_waiting()) is not None:
            if not self._admit(seq):
                return
            if seq.phase is Phase.LOADING:
                self._unfetched[seq] = None
            else:
                self._add_slice(draft, seq, min(seq.todo, draft.budget))

    def _next_waiting(self) -> Sequence | None:
        """Of the tenants that may have more, the first of the one that has the fewest rows."""
        held = self._rows.held
        fronts = sorted(self.waiting.fronts(), key=lambda seq: (held[seq.request.tenant], self._rank(seq)))
        return next(filter(self._may_start, fronts), None)  # which looks at as few as it can

    def _may_start(self, seq: Sequence) -> bool:
        if seq.holds or (self.flow is Flow.DRAIN and not seq.preempted):
            return False
        tenant = seq.request.tenant
        return not tenant or (self._rows.may_take(tenant, several=True) and self._may_own(seq))

    def _may_own(self, seq: Sequence) -> bool:
        """Whether enough blocks stay free for other tenants; one that owns nothing is not asked."""
        tenant, free = seq.request.tenant, self.pool.available
        own = sum(other.own for other in self.running if other.request.tenant == tenant)
        need = self.pool.blocks_for(len(seq.tokens))
        if not own or own + need <= FACTOR * (free - need):
            return True
        need -= len(self._cached_prefix(seq))
        return own + need <= FACTOR * (free - need)

    def _begin_fetches(self, draft: StepDraft) -> None:
        """Let transfers fill blocks that no launched step touches: unlike steps, they keep no order."""
        if self._unfetched:
            touched = {block for _, blocks in self._touched for block in blocks}
            for seq in list(self._unfetched):
                if touched.isdisjoint(seq.blocks[seq.published :]):
                    del self._unfetched[seq]
                    draft.fetches.append(self._fetch(seq))

    def commit(self, result: StepResult) -> None:
        """The oldest launched step has landed."""
        plan, sequences = self._launched.popleft()
        assert plan.step == result.step, f"step {result.step} landed before step {plan.step}"
        while self._touched and self._touched[0][0] <= plan.step:
            self._touched.popleft()
        tokens, logprobs, lost = result.tokens, result.logprobs, result.lost
        lengths, last = iter(result.lengths or repeat(1)), 0
        for i, (seq, samples) in enumerate(zip(sequences, plan.samples, strict=True)):
            first = last
            if samples:
                last += next(lengths)
            seq.holds -= 1
            seq.sampling -= samples
            if seq.phase is not Phase.RUNNING:
                # Aborted or preempted while the step ran: its tokens do not count.
                self._release(seq)
                continue
            if scores := result.prompt_logprobs.get(i):
                self._tell_scores(seq, plan.starts[i], scores)
            if seq.lease is not None:
                # Steps land in order, so whatever this one has found in the cache is written too.
                self.leases.fill(seq.lease, (plan.starts[i] + plan.counts[i]) // self.pool.block_size)
            if last == first + 1 and not lost:  # nearly all
                self._append(seq, tokens[first], logprobs.get(first))
            elif samples:
                self._accept_run(seq, result, first, last)

    @property
    def next_deadline_s(self) -> float:
        """When `tick` will have something to end."""
        first = self._deadlines.front().deadline_s if self._deadlines else inf
        return min(first, *(lease.until_s for lease in self.leases), inf)

    @property
    def in_flight(self) -> int:
        """Steps launched and not yet landed."""
        return len(self._launched)

    # -- transfers --------------------------------------------------------------

    @property
    def fetches(self) -> int:
        """Sequences whose KV is on its way to us, wanted or not."""
        return len(self._fetching)

    def transfer_done(self, id: int, ok: bool) -> None:
        """The fetch for a sequence has filled its blocks, or never will; either way it no longer touches them."""
        seq = self._fetching.pop(id)
        seq.holds -= 1
        ticket, seq.ticket = seq.ticket, None
        if seq.phase is not Phase.LOADING:
            self._release(seq)
            return
        seq.phase = Phase.RUNNING
        if ok and ticket is not None and ticket.version == self.version:
            # One token short of everything, because sampling needs a token to compute.
            seq.computed = max(seq.computed, min(ticket.tokens, len(seq.tokens) - 1))
            self.counters.transfers += 1
        else:
            self.counters.transfers_lost += 1  # a lost transfer is just a local prefill

    # -- hold and go on ---------------------------------------------------------

    def pause(self, flow: Flow) -> None:
        self.flow = flow

    def resume(self) -> None:
        self.flow = Flow.RUN

    @property
    def quiesced(self) -> bool:
        """Nothing runs on the device, and nothing will."""
        return self.flow is Flow.FROZEN and not self._launched

    @property
    def drained(self) -> bool:
        """Everything that had started has ended."""
        return not (self.running or any(seq.preempted for seq in self.waiting.fronts()))

    def weights_changed(self, version: int, *, recompute: bool) -> None:
        """From now on keys and tokens belong to `version`. KV of the old weights is never hit again."""
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
        """Somebody besides running sequences counts on KV: a lease, a transfer, or what it leaves behind."""
        return bool(len(self.leases) or self._fetching or self.leaving)

    def kv_lost(self) -> None:
        """The content of all blocks is gone. What ran keeps its tokens and computes them again."""
        assert self.quiesced and not self.lends_kv
        for seq in list(self.running):
            self._preempt(seq)
        self.pool.flush()

    # -- admission --------------------------------------------------------------

    def _new_sequence(self, request: GenerateRequest) -> Sequence:
        number, sampling = next(self._arrivals), request.sampling
        deadline_s = inf if request.timeout_s is None else self.now_s + request.timeout_s
        due_s = min(deadline_s, self.now_s + self.limits.patience_s)
        wait_s = self.limits.export_wait_s if request.export_kv else inf
        stops: dict[int, Cause] = dict.fromkeys(sampling.stop_token_ids, "stop_token")
        if not sampling.ignore_eos:
            stops |= dict.fromkeys(self.limits.eos_token_ids, "eos")
        tokens = [*request.prompt, *request.generated]
        packed = array("I", tokens)
        self._check_ids(packed)
        return Sequence(
            request=request,
            tokens=tokens,
            packed=packed,
            limit=self._limit(request),
            stops=stops,
            order=(request.priority, due_s, number),
            arrived_s=self.now_s,
            deadline_s=min(deadline_s, self.now_s + wait_s),
            lockstep=sampling.grammar is not None,
            ticket=request.ticket,
        )

    def _limit(self, request: GenerateRequest) -> int:
        """Tokens that this sequence may have in all; raises if it can never run."""
        limit = self._answer_limit(request)
        if not request.export_kv:
            return limit
        if not self.limits.exports:
            raise RequestError(
                "this engine serves no KV to others (kv_listen); leave export_kv out", param="export_kv"
            )
        # Whole blocks, and one token short of everything: the other engine needs one to compute.
        size, tokens = self.pool.block_size, len(request.prompt) + len(request.generated)
        exported = (tokens - 1) // size * size
        if exported > self.max_context:
            raise ContextTooLong(
                f"prompt and what was generated have {tokens} tokens; this engine holds {self.max_context}",
                param="resume",
            )
        return exported + 1

    def _check_ids(self, tokens: array[int]) -> None:
        if (found := largest(tokens)) >= self.limits.vocab_size:
            raise RequestError(
                f"token id {found} is outside the vocabulary of {self.limits.vocab_size}", param="prompt"
            )

    def _answer_limit(self, request: GenerateRequest) -> int:
        if request.id in self.sequences:
            raise DuplicateId(f"request {request.id} is already running")
        if request.sampling.grammar is not None and not self.limits.takes_grammars:
            raise RequestError(
                "this model has no tokenizer that a grammar could be matched with; ask for plain text",
                param="response_format",
            )
        prompt_len, max_tokens, most = len(request.prompt), request.sampling.max_tokens, self.max_context
        if prompt_len >= most:
            raise ContextTooLong(
                f"prompt has {prompt_len} tokens; with room for an answer this engine takes {most - 1}",
                param="prompt",
            )
        if max_tokens is None:
            return most
        if prompt_len + max_tokens > most:
            raise ContextTooLong(
                f"prompt has {prompt_len} tokens and max_tokens is {max_tokens}; together this engine takes {most}",
                param="max_tokens",
            )
        return prompt_len + max_tokens

    @property
    def max_context(self) -> int:
        return min(self.limits.max_context, self.pool.num_blocks * self.pool.block_size)

    def _rank(self, seq: Sequence) -> Rank:
        """Who has started goes first; then by priority, due time and arrival."""
        return (seq.started_s is None, *seq.order)

    def _watch(self, seq: Sequence) -> None:
        if seq.deadline_s < inf:
            self._deadlines.add((seq.deadline_s, seq.order[-1]), seq)

    def _unwatch(self, seq: Sequence) -> None:
        if seq.deadline_s < inf:
            self._deadlines.remove((seq.deadline_s, seq.order[-1]), seq)

    def _admit(self, seq: Sequence) -> bool:
        """Give `seq` a row and blocks for all its tokens, or leave everything as it was. Never preempts."""
        hit = self._cached_prefix(seq)
        need = self.pool.blocks_for(min(len(seq.tokens), seq.limit - 1)) - len(hit)
        # One block for each running sequence stays free, so that admission does not cause preemption at once.
        if need + self.pool.idle(hit) + len(self.running) > self.pool.available:
            return False
        self.waiting.remove(self._rank(seq), seq)
        self.running[seq] = None
        self.pool.retain(hit)
        seq.blocks, seq.own = hit + self.pool.allocate(need), need
        seq.row = self._free_rows.pop()
        self._rows.take(seq.request.tenant)
        seq.computed, seq.published = len(hit) * self.pool.block_size, len(hit)
        seq.phase = Phase.LOADING if self._worth_fetching(seq) else Phase.RUNNING
        if seq.phase is Phase.RUNNING:
            self._drop_ticket(seq)
        if seq.exports:
            self._lend(seq)
        self._note_admission(seq)
        return True

    def _cached_prefix(self, seq: Sequence) -> list[int]:
        if self._unscored(seq):
            return []
        # One token short of everything, because sampling needs a token to compute. An export computes its last block
        # itself: when that has landed, what it found in the cache is known to be written.
        return self.pool.lookup(self._keys(seq, (len(seq.tokens) - 1) // self.pool.block_size - seq.exports))

    def _unscored(self, seq: Sequence) -> bool:
        """Every prompt position must be computed to be scored, here and by this sequence."""
        return seq.request.sampling.prompt_logprobs is not None and seq.scored < seq.prompt_len

    def _worth_fetching(self, seq: Sequence) -> bool:
        ticket = seq.ticket
        if ticket is None or ticket.version != self.version or ticket.tokens <= seq.computed or self._unscored(seq):
            return False
        count, rest = divmod(ticket.tokens, self.pool.block_size)
        return rest == 0 and ticket.tokens <= len(seq.tokens) and ticket.key == self._keys(seq, count)[-1]

    def _fetch(self, seq: Sequence) -> Fetch:
        assert seq.ticket is not None
        skip = seq.published
        self._fetching[seq.id] = seq
        seq.holds += 1
        return Fetch(seq.id, seq.ticket, skip, tuple(seq.blocks[skip : self.pool.blocks_for(seq.ticket.tokens)]))

    def _drop_ticket(self, seq: Sequence) -> None:
        """Whatever a ticket names is not wanted any more. A fetch that is under way will fail, and still be told of."""
        if seq.ticket is not None:
            self.unwanted.append(seq.id)
            seq.ticket = None

    def _lend(self, seq: Sequence) -> None:
        """Let another engine fetch the KV of `seq`, from now on and as it is computed."""
        lease = self.leases.grant(seq.id, self.version, tuple(seq.blocks), self.now_s + self.limits.lease_s)
        seq.lease = lease.id
        self._unwatch(seq)  # it waits no more, and has what is left of its own time
        seq.deadline_s = inf if seq.request.timeout_s is None else seq.arrived_s + seq.request.timeout_s
        self._watch(seq)
        key = self._keys(seq, len(seq.blocks))[-1]
        ticket = Ticket(self.limits.engine, lease.id, lease.generation, seq.limit - 1, self.version, key)
        self._outbox.tickets[seq.id] = ticket

    def _note_admission(self, seq: Sequence) -> None:
        if seq.started_s is None:
            seq.started_s, seq.cached_tokens = self.now_s, seq.computed
        self.counters.prompt_tokens += len(seq.tokens)
        self.counters.cached_tokens += seq.computed

    # -- progress ---------------------------------------------------------------

    def _cover(self, seq: Sequence, tokens: int) -> bool:
        """Make sure that `seq` has blocks for its first `tokens` tokens, preempting from the back if need be."""
        need = self.pool.blocks_for(tokens) - len(seq.blocks)
        while need > self.pool.available:
            if self.returning:
                return False  # blocks are on their way home; wait for them
            victim = self._victim()
            self._evict(victim)
            if victim is seq:
                return False
        if need > 0:
            seq.blocks += self.pool.allocate(need)
            seq.own += need
        return True

    def _victim(self) -> Sequence:
        """The last in order, of the tenant that owns most.

        A tenant with a single sequence is spared unless all have only one, so that the first in order always goes on.
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
        samples = end == len(seq.tokens) + seq.sampling
        seq.sampling += samples
        draft.add_slice(seq, start, count, samples)
        self._publish(seq)

    def _accept_run(self, seq: Sequence, result: StepResult, first: int, last: int) -> None:
        """Append the tokens `first` to `last` of a result, up to the one that ends the answer."""
        assert last - first == 1 or not seq.sampling, "a later step was planned for the position after one token"
        if first == last:
            seq.computed -= 1  # nothing was sampled: compute the last token again, because sampling needs one
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
        if seq.exports:
            if seq.limit == 1:
                self._finish(seq, *FETCHED)  # there is not one whole block to export
        elif not seq.output_len:
            return
        elif (cause := seq.stops.get(seq.tokens[-1])) and seq.output_len > seq.request.sampling.min_tokens:
            self._finish(seq, "stop", cause)
        elif len(seq.tokens) >= seq.limit:
            self._finish(seq, "length", "max_tokens")

    def _tell_scores(self, seq: Sequence, start: int, scores: tuple[Logprobs, ...]) -> None:
        """Pass on log-probabilities of prompt tokens start + 1 ..., each position once however often computed."""
        fresh = scores[max(0, seq.scored - (start + 1)) :]
        told = self._outbox.prompt_logprobs.get(seq.id, ())
        self._outbox.prompt_logprobs[seq.id] = told + fresh
        seq.scored += len(fresh)

    def _publish(self, seq: Sequence) -> None:
        """Offer our full blocks to the cache: steps run in order, so whoever finds them reads after they are written."""
        full = min(seq.computed, len(seq.tokens)) // self.pool.block_size
        if full <= seq.published or not seq.pure:
            return
        keys = self._keys(seq, full)
        for i in range(seq.published, full):
            self.pool.publish(seq.blocks[i], keys[i])
        seq.published = full

    def _keys(self, seq: Sequence, count: int) -> list[bytes]:
        return seq.keys(count, version=self.version, block_size=self.pool.block_size)

    # -- the only ways out ------------------------------------------------------

    def _finish(self, seq: Sequence, reason: FinishReason, cause: Cause) -> None:
        if seq.phase is not Phase.WAITING:  # or else it has no blocks, though steps of it may be under way
            self._publish(seq)
        self._dequeue(seq)
        self._drop_ticket(seq)
        if seq.lease is not None:
            self.leases.end(seq.lease)
            seq.lease = None
        self.counters.rescheduled += reason == "pd_reschedule"
        seq.phase = Phase.FINISHED
        del self.sequences[seq.id]
        self._unwatch(seq)
        self._outbox.ended.append(
            Ended(
                seq.id,
                reason,
                cause,
                seq.prompt_len,
                seq.cached_tokens or 0,
                seq.output_len,
                Timings(seq.arrived_s, seq.started_s, seq.first_token_s, self.now_s),
            )
        )
        self._release(seq)

    def _evict(self, seq: Sequence) -> None:
        """Take the blocks of `seq` for others. Who waits for an export is told at once, not after a second try."""
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
            self._unfetched.pop(seq, None)

    def _release(self, seq: Sequence) -> None:
        """Take back what `seq` owns: its blocks now if that is safe, its row when the last step that has it has landed."""
        if seq.holds and self._drafting:
            # It may be in the draft, and nobody else shall write its blocks in the same step.
            self._evicted.append(seq)
        elif self._fetching.get(seq.id) is not seq:
            self._release_blocks(seq)
        if seq.holds:
            self.leaving.add(seq)
            return
        self.leaving.discard(seq)
        if seq.row >= 0:
            self._free_rows.append(seq.row)
            self._rows.give_back(seq.request.tenant)
            seq.disown()

    def _release_blocks(self, seq: Sequence) -> None:
        """Steps run in order: whoever gets these blocks writes them after the last step that was launched for `seq`."""
        blocks, seq.blocks = seq.blocks, []
        self.pool.release(blocks)
        if blocks and seq.holds:
            last, _ = self._launched[-1]
            self._touched.append((last.step, blocks))

    def _release_evicted(self) -> None:
        evicted, self._evicted = self._evicted, []
        for seq in evicted:
            self._release(seq)

    @property
    def returning(self) -> list[Sequence]:
        """Gone, with blocks that somebody still writes in no order with the steps to come."""
        return [seq for seq in self.leaving if seq.blocks]

    # -- self-check -------------------------------------------------------------

    def check(self) -> None:
        """Assert the invariants that can be seen from here; cheap enough for every idle moment."""
        self.pool.check(self._holders())
        owners = [*self.running, *self.leaving]
        rows = [seq.row for seq in owners] + self._free_rows
        assert sorted(rows) == list(range(self.limits.max_running))
        assert self._rows.held == Counter(seq.request.tenant for seq in {*owners} if seq.row >= 0)
        assert {*self.running, *self.waiting} == set(self.sequences.values())
        lent = {seq.id: tuple(seq.blocks) for seq in self.running if seq.lease is not None}
        assert lent == {lease.sequence: lease.blocks for lease in self.leases}
        for seq in self.sequences.values():
            self._check_sequence(seq)

    def _check_sequence(self, seq: Sequence) -> None:
        assert seq in self.running if seq.phase in (Phase.LOADING, Phase.RUNNING) else seq not in self.running
        assert seq.phase is not Phase.FINISHED
        assert seq in self.leaving or seq.computed <= len(seq.tokens) + seq.sampling
        assert seq.phase is not Phase.WAITING or seq in self.leaving or not (seq.blocks or seq.holds)

    def _holders(self) -> Mapping[int, int]:
        holders: Counter[int] = Counter()
        for seq in {*self.running, *self.leaving}:
            holders.update(seq.blocks)
        return holders
