"""Admission checks: whether a request can ever run, and whether a waiting sequence can start now.

The checks read the block pool, the rows and the running sequences, and change nothing. The scheduler decides in which
order sequences are checked, and owns all state.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from headgate.core.blocks import BlockPool
from headgate.core.limits import SchedulerLimits
from headgate.core.sequence import Sequence
from headgate.errors import ContextTooLong, RequestError
from headgate.protocol.groups import present
from headgate.protocol.keys import largest
from headgate.protocol.output import Cause
from headgate.protocol.request import GenerateRequest
from headgate.shares import FACTOR, Shares


@dataclass(frozen=True, slots=True)
class Room:
    """What a sequence gets when it is admitted."""

    hit: list[int]  # cached blocks, by stripes; those that it does not need are absent
    stripes: int  # the stripes that it gets all blocks of; windows reach those after them later
    fetches: bool  # it fetches KV from another engine


class AdmissionChecks:
    def __init__(self, limits: SchedulerLimits, pool: BlockPool, row_shares: Shares) -> None:
        self._limits = limits
        self._pool = pool
        self._groups = groups = pool.groups
        fits = groups.longest_context(pool.num_blocks, limits.max_batch_tokens, limits.max_context)
        self.max_context = min(limits.max_context, fits)
        # Exports and fetches need all blocks of their tokens at the same time.
        self.max_whole = min(limits.max_context, pool.num_blocks // len(groups) * pool.block_size)
        self._row_shares = row_shares

    # -- whether a request can ever run -----------------------------------------

    def new_sequence(self, request: GenerateRequest, number: int, now_s: float) -> Sequence:
        """Return the sequence for the `number`th request; raise a RequestError if the request can never run."""
        limits, sampling = self._limits, request.sampling
        deadline_s = inf if request.timeout_s is None else now_s + request.timeout_s
        due_s = min(deadline_s, now_s + limits.patience_s)
        wait_s = limits.export_wait_s if request.export_kv else inf
        stops: dict[int, Cause] = dict.fromkeys(sampling.stop_token_ids, "stop_token")
        if not sampling.ignore_eos:
            stops |= dict.fromkeys(limits.eos_token_ids, "eos")
        tokens = [*request.prompt, *request.generated]
        packed = array("I", tokens)
        self._check_token_ids(packed)
        self._check_adapter(request.adapter)
        return Sequence(
            request=request,
            tokens=tokens,
            packed=packed,
            limit=self._token_limit(request),
            stops=stops,
            order=(request.priority, due_s, number),
            arrived_s=now_s,
            deadline_s=min(deadline_s, now_s + wait_s),
            lockstep=sampling.grammar is not None,
            pooled=request.pooling is not None,
            scored=max(1, sampling.prompt_logprobs_start),
            ticket=request.ticket,
        )

    def _check_token_ids(self, tokens: array[int]) -> None:
        if (found := largest(tokens)) >= self._limits.vocab_size:
            raise RequestError(
                f"token id {found} is outside the vocabulary of {self._limits.vocab_size}", param="prompt"
            )

    def _check_adapter(self, adapter: str) -> None:
        if adapter and adapter not in self._limits.adapters:
            raise RequestError(f"the adapter {adapter!r} is not loaded", param="adapter")

    def _token_limit(self, request: GenerateRequest) -> int:
        """How many tokens the sequence may have, prompt and answer together."""
        limit = self._answer_limit(request)
        if request.pooling is not None:
            return limit + 1  # so that the last token is computed
        return self._export_limit(request) if request.export_kv else limit

    def _answer_limit(self, request: GenerateRequest) -> int:
        if request.sampling.grammar is not None and not self._limits.takes_grammars:
            raise RequestError(
                "this model has no tokenizer, so an answer cannot follow a grammar; ask for plain text",
                param="response_format",
            )
        if request.sampling.return_routed_experts and not self._limits.keeps_routed_experts:
            raise RequestError(
                "this engine does not keep the experts of tokens; start it with --routed-experts (the model must have "
                "experts), or leave return_routed_experts out",
                param="return_routed_experts",
                code="unsupported_parameter",
            )
        prompt_len, max_tokens, most = len(request.prompt), request.sampling.max_tokens, self.max_context
        if prompt_len >= most and max_tokens != 0:
            raise ContextTooLong(
                f"prompt has {prompt_len} tokens; this engine accepts {most - 1}, to leave room for an answer",
                param="prompt",
            )
        if max_tokens is None:
            return most
        if prompt_len + max_tokens > most:
            raise ContextTooLong(
                f"prompt has {prompt_len} tokens and max_tokens is {max_tokens}; their sum may be at most {most}",
                param="max_tokens",
            )
        return prompt_len + max_tokens

    def _export_limit(self, request: GenerateRequest) -> int:
        if not self._limits.exports:
            raise RequestError("this engine does not export KV; leave export_kv out", param="export_kv")
        # Only whole blocks are exported, and never the last token: the other engine must compute one to sample.
        size, tokens = self._pool.block_size, len(request.prompt) + len(request.generated)
        exported = (tokens - 1) // size * size
        if exported > self.max_whole:
            raise ContextTooLong(
                f"prompt and generated tokens together are {tokens}; this engine holds at most {self.max_whole}",
                param="resume",
            )
        return exported + 1

    # -- whether a waiting sequence can start now -------------------------------

    def within_share(self, seq: Sequence, running: Iterable[Sequence], version: int) -> bool:
        """Whether enough rows and blocks stay free for other tenants if `seq` starts."""
        tenant = seq.request.tenant
        if not self._row_shares.may_take(tenant, several=True):
            return False
        free = self._pool.available
        own = sum(other.own for other in running if other.request.tenant == tenant)
        need = self._blocks_for(len(seq.tokens))
        if not own or own + need <= FACTOR * (free - need):
            return True  # a tenant that owns no blocks may always start
        need -= len(present(self._cached_prefix(seq, version)))
        return own + need <= FACTOR * (free - need)

    def find_room(self, seq: Sequence, running: int, version: int) -> Room | None:
        """Return what `seq` gets if it is admitted now, or None if too few blocks are available.

        `running` is the number of running sequences.
        """
        groups, pool, hit = self._groups, self._pool, self._cached_prefix(seq, version)
        found, wanted = len(hit) // len(groups), groups.stripes_for(seq.wanted)
        fetches = self._worth_fetching(seq, found * pool.block_size, version)
        held = present(hit)
        if fetches or seq.exports:
            stripes, need = wanted, (wanted - found) * len(groups)
        else:
            stripes = min(wanted, found + groups.stripes_for(self._limits.max_batch_tokens))
            need = self._blocks_for(seq.wanted) - len(held)
        # One stripe for each running sequence stays free, so that admission does not cause preemption at once.
        if need + pool.idle(held) + running * len(groups) > pool.available:
            return None
        return Room(hit, stripes, fetches)

    def _blocks_for(self, tokens: int) -> int:
        """The most blocks that a sequence holds until it has computed `tokens` tokens."""
        return self._groups.most_blocks(self._groups.stripes_for(tokens), self._limits.max_batch_tokens)

    def _cached_prefix(self, seq: Sequence, version: int) -> list[int]:
        # The last token is always computed, because a slice needs one. An export thus computes its last block: once
        # that step has landed, all earlier steps have too, so the blocks found in the cache are known to be written.
        # The log-probability of a prompt token is computed with the position before it. The cache has no hidden states,
        # and a mean needs those of all tokens.
        if seq.request.pooling == "mean":
            return []
        size, wanted = self._pool.block_size, min(seq.wanted, seq.scored) if seq.unscored else seq.wanted
        return self._pool.lookup(seq.keys((wanted - 1) // size, version=version, block_size=size))

    def _worth_fetching(self, seq: Sequence, found: int, version: int) -> bool:
        """Whether the ticket of `seq` offers KV of its tokens beyond the `found` ones in the prefix cache."""
        ticket, size = seq.ticket, self._pool.block_size
        if ticket is None or ticket.version != version or ticket.tokens <= found or seq.unscored:
            return False
        count, rest = divmod(ticket.tokens, size)
        if rest or ticket.tokens > len(seq.tokens) or seq.wanted > self.max_whole:
            return False
        return ticket.key == seq.keys(count, version=version, block_size=size)[-1]
