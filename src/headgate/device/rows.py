"""Device rows: the state of each running sequence on the device between steps.

Token ids and block tables are on the device. A sampled token is written to its row there, so the next step can be
launched before the host has seen the token. Everything else is known when a sequence joins and stays on the host as
columns, so whether a step is greedy, penalised or returns log-probabilities is decided without waiting for the
device.

A row is never cleared; the next `Join` overwrites it. The scheduler reuses a row only when no launched step uses it
(invariant 4).
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headgate.contract.sampling import SAMPLING, SamplingParams
from headgate.protocol.plan import Join, StepPlan

Ints = npt.NDArray[np.int64]
Records = npt.NDArray[Any]  # of dtype RECORD

COLUMNS = {name: each.column for name, each in SAMPLING.items() if each.column is not None}
RECORD = np.dtype(
    [
        *((name, np.dtype(column.dtype)) for name, column in COLUMNS.items()),
        ("prompt_len", np.int32),
        ("biased", np.bool_),
        ("penalised", np.bool_),
    ],
    align=True,
)

_VALUES = attrgetter(*COLUMNS)
_ABSENT = [(i, column.absent) for i, (name, column) in enumerate(COLUMNS.items()) if SAMPLING[name].default is None]
_SEED, _TEMPERATURE, _TOP_K = map(list(COLUMNS).index, ("seed", "temperature", "top_k"))

# Below this, dividing by the temperature overflows float32 long before it changes which token wins.
GREEDY_BELOW = 1e-5


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy `values` to `device` without waiting for running work."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host if device.type == "cpu" else pinned(host).to(device, non_blocking=True)


def upload(values: npt.NDArray[Any], out: torch.Tensor) -> None:
    """Copy `values` to `out` on a device without waiting for running work."""
    host = torch.from_numpy(values)
    out.copy_(pinned(host) if out.is_cuda else host, non_blocking=True)


def pinned(host: torch.Tensor) -> torch.Tensor:
    """A pinned copy that the device reads asynchronously. Torch does not reuse its memory before that."""
    return host.pin_memory()


class Rows:
    """`max_rows` rows of up to `max_context` tokens, whose KV is in blocks of `block_size`.

    Layers are in `groups` groups, and each group has block tables of its own (see `protocol.groups`).
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_context: int,
        block_size: int,
        vocab_size: int,
        groups: int = 1,
        eos_ids: tuple[int, ...] = (),
        adapters: tuple[str, ...] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.max_rows = max_rows
        self.max_context = max_context
        self.block_size = block_size
        self.groups = groups
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        # One column more than the context: the last token of a full sequence is sampled but never computed.
        self.tokens = torch.zeros(max_rows, max_context + 1, dtype=torch.int32, device=device)
        stripes = -(-max_context // block_size)
        self.tables = torch.zeros(groups, max_rows, stripes, dtype=torch.int32, device=device)
        self.sampling: Records = np.zeros(max_rows, dtype=RECORD)
        self.adapters: npt.NDArray[np.int32] = np.zeros(max_rows, dtype=np.int32)  # 0: the base model
        self.stop_ids: list[Ints] = [_NO_IDS] * max_rows
        self.bias: list[tuple[Ints, npt.NDArray[np.float32]]] = [(_NO_IDS, _NO_BIAS)] * max_rows
        self._adapter_numbers = {name: number for number, name in enumerate(("", *adapters))}
        self._stripes = [0] * max_rows  # number of entries set in each table of a row

    def apply(self, plan: StepPlan) -> None:
        """Set up the rows of sequences that join with this plan, and extend the tables that grow."""
        for join in plan.joins:
            self._set_up_row(join)
        if plan.joins:
            self._write_joined_tokens(plan)
        added = [(join.row, join.blocks) for join in plan.joins] + list(plan.grown)
        if added:
            self._extend_tables(added)

    def grow_in_place(self, plan: StepPlan) -> Ints:
        """Apply the plan of a decode step, except for blocks that the device can add itself (see
        `layers.triton.step`).

        Returns one number per slice: the block to append to the row's block table before the slice's token is
        written, or -1 for none.
        """
        grown = np.full(len(plan.rows), -1, dtype=np.int64)
        place = {row: i for i, row in enumerate(plan.rows)} if plan.grown else {}
        in_place = all(
            len(blocks) == 1 and plan.starts[place[row]] == self._stripes[row] * self.block_size
            for row, blocks in plan.grown
        )
        if plan.joins or not in_place:  # a stripe of several blocks is not added in place either
            self.apply(plan)
            return grown
        for row, (block,) in plan.grown:
            grown[place[row]] = block
            self._stripes[row] += 1
        return grown

    def write_tokens(self, rows: Ints, positions: Ints, tokens: torch.Tensor) -> None:
        """Append sampled tokens on the device; a later step reads them there."""
        where = to_device(rows * self.tokens.shape[1] + positions, self.tokens.device)
        self.tokens.view(-1).index_copy_(0, where, tokens.to(torch.int32))

    def _set_up_row(self, join: Join) -> None:
        row, params = join.row, join.sampling
        self.sampling[row] = _record(params, join.prompt_len, self.vocab_size)
        self.stop_ids[row] = self._known(params.stop_token_ids + (() if params.ignore_eos else self.eos_ids))
        self.bias[row] = self._known_bias(params.logit_bias)
        self.adapters[row] = self._adapter_numbers[join.adapter]
        self._stripes[row] = 0

    def _write_joined_tokens(self, plan: StepPlan) -> None:
        """Write the tokens of sequences that join: all tokens if penalties read them, otherwise those without KV."""
        computed = dict(zip(plan.rows, plan.starts, strict=True))
        where, texts = [], []
        for join in plan.joins:
            start = 0 if join.sampling.penalised else computed.get(join.row, 0)
            text = np.array(join.tokens[start:], dtype=np.int32)
            first = join.row * self.tokens.shape[1] + start
            where.append(np.arange(first, first + len(text)))
            texts.append(text)
        device = self.tokens.device
        index, values = to_device(np.concatenate(where), device), to_device(np.concatenate(texts), device)
        self.tokens.view(-1).index_copy_(0, index, values)

    def _known(self, ids: tuple[int, ...]) -> Ints:
        """The `ids` within the vocabulary. Forbidding or biasing any other id has no effect."""
        return np.array(sorted({token for token in ids if token < self.vocab_size}), dtype=np.int64)

    def _known_bias(self, bias: dict[int, float]) -> tuple[Ints, npt.NDArray[np.float32]]:
        if not bias:
            return _NO_IDS, _NO_BIAS
        ids = self._known(tuple(bias))
        return ids, np.array([bias[token] for token in ids.tolist()], dtype=np.float32)

    def _extend_tables(self, added: list[tuple[int, tuple[int, ...]]]) -> None:
        groups, max_rows, width = self.tables.shape
        where: list[int] = []
        blocks: list[int] = []
        for row, new in added:
            first = self._stripes[row]
            self._stripes[row] = last = first + len(new) // groups
            # Writing past the end of a table would overwrite the next row.
            assert last <= width, f"row {row} has {last} stripes of blocks; its tables hold {width}"
            for group in range(groups):
                table = (group * max_rows + row) * width
                where.extend(range(table + first, table + last))
                blocks.extend(new[group::groups])
        index = to_device(np.array(where, dtype=np.int64), self.tables.device)
        entries = to_device(np.array(blocks, dtype=np.int32), self.tables.device)
        self.tables.view(-1).index_copy_(0, index, entries)


_NO_IDS: Ints = np.zeros(0, dtype=np.int64)
_NO_BIAS: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)


def _record(params: SamplingParams, prompt_len: int, vocab_size: int) -> tuple[float, ...]:
    """One row of `RECORD`, in its order."""
    greedy = params.temperature < GREEDY_BELOW
    assert greedy or params.seed is not None, "a sequence that samples must have a seed"
    record = [*_VALUES(params), prompt_len, bool(params.logit_bias), params.penalised]
    for place, absent in _ABSENT:
        if record[place] is None:
            record[place] = absent
    record[_SEED] %= 2**64
    if greedy:
        record[_TEMPERATURE] = 0.0
    if params.top_k >= vocab_size:
        record[_TOP_K] = 0
    return tuple(record)
