"""Turns logits into tokens. A row's token never depends on other rows in the batch.

The order of operations, per row: logit bias; stop tokens forbidden while the answer is shorter than `min_tokens`;
repetition penalty (prompt and answer), frequency and presence penalties (answer); tokens forbidden by the row's
grammar; then the choice, which `draw` defines.
"""

from __future__ import annotations

import numpy as np
import torch

from headgate.device.rows import Ints, Records, Rows, to_device
from headgate.device.sampling.draw import Draw, Knobs, draw, stream_keys
from headgate.device.sampling.grammar import Grammars
from headgate.device.sampling.logprobs import Scores


class Sampler:
    """Samples one token for each of some rows. Keeps no state of rows between calls."""

    def __init__(self, rows: Rows, draw: Draw = draw, grammars: Grammars | None = None) -> None:
        self._rows = rows
        self._draw = draw
        self._grammars = grammars
        self._counts = torch.zeros(0, device=rows.tokens.device)  # see _penalise; zero between calls

    def sample(self, logits: torch.Tensor, rows: Ints, positions: Ints, scores: Scores | None = None) -> torch.Tensor:
        """The tokens [R] for `positions` of `rows`. Overwrites `logits` [R, V] float32.

        `scores` takes the distributions that it needs on the way.
        """
        logits, records = logits.contiguous(), self._rows.sampling[rows]
        if scores is not None:
            scores.take_raw(logits)
        self._add_bias(logits, rows, records)
        self._forbid_stops(logits, rows, records, positions)
        self._penalise(logits, rows, records, positions)
        if self._grammars is not None:
            self._grammars.forbid(logits, rows)
        knobs = knobs_of(records, positions)
        if scores is not None:
            knobs = scores.take_adjusted(logits, knobs)
        return self._draw(logits, knobs)

    def adjusts(self, rows: Ints, positions: Ints) -> bool:
        """Whether any of these rows needs more than the largest logit, or the largest with noise."""
        records = self._rows.sampling[rows]
        return bool(
            np.any(records["biased"] | records["penalised"])
            or np.any(positions - records["prompt_len"] < records["min_tokens"])
            or np.any(knobs_of(records, positions).filtered)
            or (self._grammars is not None and self._grammars.hold_any(rows))
        )

    def _add_bias(self, logits: torch.Tensor, rows: Ints, records: Records) -> None:
        biased = np.flatnonzero(records["biased"])
        if not biased.size:
            return
        ids = [i * logits.shape[1] + self._rows.bias[rows[i]][0] for i in biased]
        amounts = [self._rows.bias[rows[i]][1] for i in biased]
        where, what = to_device(np.concatenate(ids), logits.device), np.concatenate(amounts)
        logits.view(-1).index_add_(0, where, to_device(what, logits.device))

    def _forbid_stops(self, logits: torch.Tensor, rows: Ints, records: Records, positions: Ints) -> None:
        early = np.flatnonzero(positions - records["prompt_len"] < records["min_tokens"])
        if not early.size:
            return
        ids = [i * logits.shape[1] + self._rows.stop_ids[rows[i]] for i in early]
        logits.view(-1).index_fill_(0, to_device(np.concatenate(ids), logits.device), -torch.inf)

    def _penalise(self, logits: torch.Tensor, rows: Ints, records: Records, positions: Ints) -> None:
        """Lower the logits of tokens already seen, and touch only those: the cost is linear in the text."""
        penalised = np.flatnonzero(records["penalised"])
        if not penalised.size:
            return
        records = records[penalised]

        def column(name: str) -> torch.Tensor:
            return to_device(records[name], logits.device)[:, None]

        seen, answered = self._history(rows[penalised], positions[penalised], column("prompt_len"))
        counts = self._count(seen, answered, logits.shape[1])
        where = (to_device(penalised, logits.device)[:, None] * logits.shape[1] + seen).view(-1)
        values = logits.view(-1).index_select(0, where).view_as(seen)
        repetition = column("repetition_penalty")
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= counts * column("frequency_penalty")
        values -= (counts > 0) * column("presence_penalty")
        # A token seen twice is written twice, with the same value.
        logits.view(-1).index_copy_(0, where, values.view(-1))

    def _history(self, rows: Ints, lengths: Ints, prompt_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of some rows [P, longest], and which are the answer. A row repeats its first token past its end."""
        tokens, ends = self._rows.tokens, to_device(lengths, prompt_lens.device)[:, None]
        index = torch.arange(int(lengths.max()), device=tokens.device)
        seen = tokens[:, : len(index)].index_select(0, to_device(rows, tokens.device)).long()
        return torch.where(index < ends, seen, seen[:, :1]), (index >= prompt_lens) & (index < ends)

    def _count(self, ids: torch.Tensor, which: torch.Tensor, vocab: int) -> torch.Tensor:
        """For every entry of `ids` [P, L], how often its token occurs in its row where `which` holds."""
        if self._counts.numel() < len(ids) * vocab:
            self._counts = torch.zeros(len(ids) * vocab, device=ids.device)
        where = (torch.arange(len(ids), device=ids.device)[:, None] * vocab + ids).view(-1)
        self._counts.index_add_(0, where, which.float().view(-1))
        counts = self._counts.index_select(0, where).view_as(ids)
        # Clearing the touched entries costs the length of the texts; a new buffer would cost the vocabulary.
        self._counts.index_fill_(0, where, 0)
        return counts


def knobs_of(records: Records, positions: Ints) -> Knobs:
    return Knobs(
        temperature=np.ascontiguousarray(records["temperature"]),
        top_k=np.ascontiguousarray(records["top_k"]),
        top_p=np.ascontiguousarray(records["top_p"]),
        min_p=np.ascontiguousarray(records["min_p"]),
        key=stream_keys(records["seed"], positions),
    )
