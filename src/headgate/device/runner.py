"""Runs one plan and returns one result. The runner decides nothing: everything is determined by the plan and the
rows.

A step sets up the rows that join, lays out the inputs, runs the model, scores prompts, computes logits where a token
is needed, samples, and writes the tokens to their rows. `launch` does all of this; `Launched.result` waits for the
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
from headgate.device.rows import Ints, Rows, to_device
from headgate.device.sampling.draw import Draw, draw
from headgate.device.sampling.grammar import Grammars
from headgate.device.sampling.logprobs import chunks, score
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
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[Logprobs, ...]] = field(default_factory=dict)
    # takes the sampled tokens and returns the indices that must not be used
    find_rejected: Callable[[list[int]], tuple[int, ...]] = accept_all
    landed: torch.cuda.Event | None = None  # set once `tokens` have arrived

    def result(self) -> StepResult:
        if self.landed is not None:
            self.landed.synchronize()
        tokens = self.tokens.tolist()
        return StepResult(self.step, tokens, self.logprobs, self.prompt_logprobs, self.find_rejected(tokens))


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
    ) -> None:
        self.model = model
        self.kv = kv
        self.rows = rows
        self._grammars = grammars
        self._graphs = graphs
        self._inputs = Inputs(rows, max_tokens=max_tokens)
        self._sampler = Sampler(rows, draw, grammars)

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
        if self._graphs is not None and self._graphs.decode.takes(plan):
            return self._replayed(plan, self._graphs.decode.replay(plan))
        self.rows.apply(plan)
        if not plan.rows:
            return Launched(plan.step, torch.empty(0, dtype=torch.int64))
        mixed = None if self._graphs is None else self._graphs.mixed
        if mixed is not None and mixed.takes(plan) and not self._scores_prompts(plan):
            return self._replayed(plan, mixed.replay(plan))
        layout = self._inputs.lay_out(plan)
        hidden = self.model(self._inputs.gather(layout), self.kv)
        prompt_logprobs = self._score_prompts(layout, hidden)
        tokens, logprobs = self._sample(layout, hidden)
        sampled = layout.rows[layout.sampling]
        return self._launched(plan.step, sampled, tokens, logprobs, prompt_logprobs)

    def _replayed(self, plan: StepPlan, done: Captured) -> Launched:
        """Complete a replayed step with the changes to logits that a graph does not support."""
        sampling = np.flatnonzero(plan.samples)
        rows = np.array(plan.rows, dtype=np.int64)[sampling]
        positions = (np.array(plan.starts, dtype=np.int64) + plan.counts)[sampling]
        tokens, logprobs = picked(done.tokens, sampling, len(plan.rows)), dict[int, Logprobs]()
        if self._sampler.adjusts(rows, positions) or np.any(self.rows.sampling["logprobs"][rows] >= 0):
            tokens, logprobs = self._choose(picked(done.logits, sampling, len(plan.rows)), rows, positions)
        return self._launched(plan.step, rows, tokens, logprobs, {})

    def _launched(
        self,
        step: int,
        rows: Ints,
        tokens: torch.Tensor,
        logprobs: dict[int, Logprobs],
        prompt_logprobs: dict[int, tuple[Logprobs, ...]],
    ) -> Launched:
        find_rejected = accept_all if self._grammars is None else partial(self._grammars.advance, rows)
        landed = None
        if self.rows.tokens.is_cuda:
            # The waiting thread must not spin, which would slow down the launching thread.
            landed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            tokens = tokens.to("cpu", non_blocking=True)
            landed.record()
        return Launched(step, tokens, logprobs, prompt_logprobs, find_rejected, landed)

    def _sample(self, layout: Layout, hidden: torch.Tensor) -> tuple[torch.Tensor, dict[int, Logprobs]]:
        """Sample a token for each slice that samples. Returns the tokens and the requested log-probabilities."""
        if not layout.sampling.size:
            return torch.empty(0, dtype=torch.int64), {}
        rows, positions = layout.rows[layout.sampling], layout.ends[layout.sampling]
        return self._choose(self._last_logits(layout, hidden), rows, positions)

    def _choose(self, logits: torch.Tensor, rows: Ints, positions: Ints) -> tuple[torch.Tensor, dict[int, Logprobs]]:
        wanted = self.rows.sampling["logprobs"][rows]
        scored = np.flatnonzero(wanted >= 0)
        # Before sampling, which overwrites the logits.
        logprobs = [logits[i].log_softmax(-1) for i in scored]
        tokens = self._sampler.sample(logits, rows, positions)
        self.rows.write_tokens(rows, positions, tokens)
        return tokens, {
            int(i): score(row, int(tokens[i]), int(wanted[i])) for i, row in zip(scored, logprobs, strict=True)
        }

    def _last_logits(self, layout: Layout, hidden: torch.Tensor) -> torch.Tensor:
        last = layout.query_starts[1:][layout.sampling] - 1
        # In steady decode every token samples, and no selection is needed.
        if len(last) < layout.num_tokens:
            hidden = hidden.index_select(0, to_device(last, hidden.device))
        return self.model.logits(hidden)

    def _scores_prompts(self, plan: StepPlan) -> bool:
        records = self.rows.sampling[list(plan.rows)]
        return bool(np.any((records["prompt_logprobs"] >= 0) & (np.array(plan.starts) + 1 < records["prompt_len"])))

    def _score_prompts(self, layout: Layout, hidden: torch.Tensor) -> dict[int, tuple[Logprobs, ...]]:
        """For slices that request it, the log-probability of each prompt token given the tokens before it."""
        records = self.rows.sampling[layout.rows]
        asking = (records["prompt_logprobs"] >= 0) & (layout.starts + 1 < records["prompt_len"])
        return {int(s): self._score_prompt(layout, int(s), hidden) for s in np.flatnonzero(asking)}

    def _score_prompt(self, layout: Layout, s: int, hidden: torch.Tensor) -> tuple[Logprobs, ...]:
        row, start, first = int(layout.rows[s]), int(layout.starts[s]), int(layout.query_starts[s])
        record = self.rows.sampling[row]
        end = min(int(layout.ends[s]) + 1, int(record["prompt_len"]))
        tokens = self.rows.tokens[row, start + 1 : end].tolist()
        hidden = hidden[first : first + len(tokens)]
        scores: list[Logprobs] = []
        for run in chunks(len(tokens), self.rows.vocab_size):
            logprobs = self.model.logits(hidden[run]).log_softmax(-1)
            top = int(record["prompt_logprobs"])
            scores += [score(row, token, top) for row, token in zip(logprobs, tokens[run], strict=True)]
        return tuple(scores)


def picked(results: torch.Tensor, slices: Ints, among: int) -> torch.Tensor:
    """The results of `slices`, out of `among` slices in all."""
    return results[:among] if len(slices) == among else results.index_select(0, to_device(slices, results.device))
