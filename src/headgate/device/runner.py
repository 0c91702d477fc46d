"""Runs one plan and returns one result. The runner decides nothing: everything is determined by the plan and the
rows.

A step sets up the rows that join, lays out the inputs, runs the model, scores and pools prompts, computes logits where
a token is needed, samples, and writes the tokens to their rows. `launch` does all of this; `Launched.result` waits for the
device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from headgate.device.inputs import Inputs, Layout
from headgate.device.pooling import Pooler, StepVectors
from headgate.device.routed import RoutedReader, StepExperts
from headgate.device.rows import Ints, Records, Rows, to_device
from headgate.device.sampling.draw import Draw, draw
from headgate.device.sampling.grammar import Grammars
from headgate.device.sampling.logprobs import Scored, Scores, chunks, drawn, score
from headgate.device.sampling.sampler import Sampler
from headgate.layers.backend import KV
from headgate.models.network import Model
from headgate.protocol.plan import Logprobs, StepPlan, StepResult

if TYPE_CHECKING:  # a machine without a GPU need not have Triton
    from headgate.device.graphs import Captured, StepGraphs


def accept_all(tokens: list[int]) -> tuple[int, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Launched:
    """A launched step. Its tokens may not have arrived on the host yet."""

    step: int
    tokens: torch.Tensor  # on the host
    scored: list[Scored] = field(default_factory=list)  # of tokens, by index; on the host
    prompt_logprobs: dict[int, tuple[Logprobs, ...]] = field(default_factory=dict)
    # takes the sampled tokens and returns the indices that must not be used
    find_rejected: Callable[[list[int]], tuple[int, ...]] = accept_all
    routed: StepExperts | None = None  # on the host
    vectors: StepVectors | None = None  # on the host
    landed: torch.cuda.Event | None = None  # set once `tokens` have arrived

    def result(self) -> StepResult:
        if self.landed is not None:
            self.landed.synchronize()
        tokens = self.tokens.tolist()
        logprobs = dict(entry for scored in self.scored for entry in scored.read())
        routed = {} if self.routed is None else self.routed.read()
        vectors = {} if self.vectors is None else self.vectors.read()
        lost = self.find_rejected(tokens)
        return StepResult(self.step, tokens, logprobs, self.prompt_logprobs, lost, routed=routed, vectors=vectors)


class ModelRunner:
    def __init__(
        self,
        model: Model,
        kv: list[KV],
        rows: Rows,
        *,
        max_tokens: int,
        draw: Draw = draw,
        grammars: Grammars | None = None,
        graphs: StepGraphs | None = None,
        routed: RoutedReader | None = None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.rows = rows
        self._grammars = grammars
        self._graphs = graphs
        self.routed = routed
        self._inputs = Inputs(rows, max_tokens=max_tokens)
        self._sampler = Sampler(rows, draw, grammars)
        self._pooler = Pooler()

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def forget_graphs(self) -> None:
        """Must be called before the weights or the cache move."""
        if self._graphs is not None:
            self._graphs.forget()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        if self._grammars is not None:
            self._grammars.apply(plan)
        self._pooler.join(plan.joins)
        if self._graphs is not None and self._graphs.decode.takes(plan):
            return self._replayed(plan, self._graphs.decode.replay(plan))
        self.rows.apply(plan)
        if not plan.rows:
            return Launched(plan.step, torch.empty(0, dtype=torch.int64))
        mixed = None if self._graphs is None else self._graphs.mixed
        if mixed is not None and mixed.takes(plan) and not self._reads_prompts(plan):
            return self._replayed(plan, mixed.replay(plan))
        layout = self._inputs.lay_out(plan)
        hidden = self.model(self._inputs.gather(layout), self.kv)
        prompt_logprobs = self._score_prompts(layout, hidden)
        vectors = self._pooler.pool(layout, hidden) if self._pooler.needs(plan) else None
        tokens, scored = self._sample(layout, hidden)
        sampled = layout.rows[layout.sampling]
        return self._launched(plan, sampled, tokens, scored, prompt_logprobs, vectors)

    def _replayed(self, plan: StepPlan, done: Captured) -> Launched:
        """Complete a replayed step with the changes to logits that a graph does not support."""
        sampling = np.flatnonzero(plan.samples)
        rows = np.array(plan.rows, dtype=np.int64)[sampling]
        positions = (np.array(plan.starts, dtype=np.int64) + plan.counts)[sampling]
        records, among = self.rows.sampling[rows], len(plan.rows)
        if self._sampler.adjusts(rows, positions) or np.any(records["logprobs"] > 0):
            tokens, scored = self._choose(picked(done.logits, sampling, among), rows, positions)
        else:
            tokens = picked(done.tokens, sampling, among)
            scored = drawn(records, picked(done.logprobs, sampling, among))
        return self._launched(plan, rows, tokens, scored, {})

    def _launched(
        self,
        plan: StepPlan,
        rows: Ints,
        tokens: torch.Tensor,
        scored: list[Scored],
        prompt_logprobs: dict[int, tuple[Logprobs, ...]],
        vectors: StepVectors | None = None,
    ) -> Launched:
        find_rejected = accept_all if self._grammars is None else partial(self._grammars.advance, rows)
        routed = None if self.routed is None else self.routed.report(plan)
        landed = None
        if self.rows.tokens.is_cuda:
            # The waiting thread must not spin, which would slow down the launching thread.
            landed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            tokens = tokens.to("cpu", non_blocking=True)
            scored = [each.to_host() for each in scored]
            routed = None if routed is None else routed.to_host()
            vectors = None if vectors is None else vectors.to_host()
            landed.record()
        return Launched(plan.step, tokens, scored, prompt_logprobs, find_rejected, routed, vectors, landed)

    def _sample(self, layout: Layout, hidden: torch.Tensor) -> tuple[torch.Tensor, list[Scored]]:
        """Sample a token for each slice that samples. Returns the tokens and the requested log-probabilities."""
        if not layout.sampling.size:
            return torch.empty(0, dtype=torch.int64), []
        rows, positions = layout.rows[layout.sampling], layout.ends[layout.sampling]
        return self._choose(self._last_logits(layout, hidden), rows, positions)

    def _choose(self, logits: torch.Tensor, rows: Ints, positions: Ints) -> tuple[torch.Tensor, list[Scored]]:
        records = self.rows.sampling[rows]
        scores = Scores(records) if np.any(records["logprobs"] >= 0) else None
        tokens = self._sampler.sample(logits, rows, positions, scores)
        self.rows.write_tokens(rows, positions, tokens)
        return tokens, [] if scores is None else scores.of(tokens)

    def _last_logits(self, layout: Layout, hidden: torch.Tensor) -> torch.Tensor:
        last = layout.query_starts[1:][layout.sampling] - 1
        # In steady decode every token samples, and no selection is needed.
        if len(last) < layout.num_tokens:
            hidden = hidden.index_select(0, to_device(last, hidden.device))
        return self.model.logits(hidden)

    def _reads_prompts(self, plan: StepPlan) -> bool:
        """Whether the hidden states of prompts are read, which a graph does not return."""
        if self._pooler.needs(plan):
            return True
        starts, counts = np.array(plan.starts, dtype=np.int64), np.array(plan.counts, dtype=np.int64)
        first, stop = scored_ranges(self.rows.sampling[list(plan.rows)], starts, starts + counts)
        return bool(np.any(first < stop))

    def _score_prompts(self, layout: Layout, hidden: torch.Tensor) -> dict[int, tuple[Logprobs, ...]]:
        """For slices that request it, the log-probability of each prompt token given the tokens before it."""
        firsts, stops = scored_ranges(self.rows.sampling[layout.rows], layout.starts, layout.ends)
        asking = np.flatnonzero(firsts < stops).tolist()
        return {s: self._score_prompt(layout, s, slice(firsts[s], stops[s]), hidden) for s in asking}

    def _score_prompt(self, layout: Layout, s: int, positions: slice, hidden: torch.Tensor) -> tuple[Logprobs, ...]:
        row, top = int(layout.rows[s]), int(self.rows.sampling[layout.rows[s]]["prompt_logprobs"])
        tokens = self.rows.tokens[row, positions].long()
        # The logits of a token are those of the position before it.
        first = int(layout.query_starts[s]) + positions.start - 1 - int(layout.starts[s])
        hidden = hidden[first : first + len(tokens)]
        scores: list[Logprobs] = []
        for run in chunks(len(tokens), self.rows.vocab_size):
            logprobs, places = self.model.logits(hidden[run]).log_softmax(-1), np.arange(run.stop - run.start)
            scored = score(logprobs, tokens[run], np.full_like(places, top), places, ranked=True)
            scores += [entry for _, entry in scored.read()]
        return tuple(scores)


def scored_ranges(records: Records, starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """For each slice, the first prompt token whose log-probability it computes, and the one after the last."""
    firsts = np.maximum(starts + 1, records["prompt_logprobs_start"])
    return firsts, np.where(records["prompt_logprobs"] >= 0, np.minimum(ends + 1, records["prompt_len"]), 0)


def picked(results: torch.Tensor, slices: Ints, among: int) -> torch.Tensor:
    """The results of `slices`, out of `among` slices in all."""
    return results[:among] if len(slices) == among else results.index_select(0, to_device(slices, results.device))
