"""The experts of an answer's tokens (`return_routed_experts`): collected as engines report them, and encoded for clients.

A token's experts are known once it has been computed. The last token of an answer never is, so an answer of `n` tokens,
with its prompt, has the experts of `n - 1`. What is missing is never made up: an incomplete answer has none.
"""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headgate.protocol.plan import RoutedExperts, RoutedShape

PART_BYTES = 3 * 2**18  # a multiple of three, so that the parts in base64 are that of the whole


class RoutedTokens:
    """The experts of consecutive tokens from position `start` on.

    Positions that arrive again are skipped: those of a sequence that was preempted, or that moved to another engine. The
    first report is what the tokens were sampled with.
    """

    def __init__(self, shape: RoutedShape, start: int) -> None:
        self._shape, self._start = shape, start
        self._ids = bytearray()

    def add(self, reports: Iterable[RoutedExperts]) -> None:
        size = self._shape.token_bytes
        for report in reports:
            known = self._start + len(self._ids) // size - report.start
            assert known >= 0, f"the experts of {-known} tokens before position {report.start} are missing"
            self._ids += memoryview(report.ids)[known * size :]

    def of_answer(self, tokens: int) -> AnswerExperts | None:
        """The experts for an answer that has `tokens` tokens with its prompt; None if some have not arrived."""
        count = max(0, tokens - 1 - self._start)
        ids = bytes(memoryview(self._ids)[: count * self._shape.token_bytes])
        return AnswerExperts(self._shape, ids) if len(ids) == count * self._shape.token_bytes else None


@dataclass(frozen=True, slots=True)
class AnswerExperts:
    shape: RoutedShape
    ids: bytes  # as in `RoutedExperts`

    def array(self) -> npt.NDArray[Any]:
        """[tokens, layers of the model, top], unsigned. Layers without experts have zeros, as in vLLM and SGLang."""
        shape = self.shape
        dtype = np.dtype("u1" if shape.size == 1 else "<u2")
        ids = np.frombuffer(self.ids, dtype).reshape(-1, len(shape.places), shape.top)
        if len(shape.places) == shape.layers:
            return ids
        array = np.zeros((len(ids), shape.layers, shape.top), dtype)
        array[:, shape.places] = ids
        return array

    def npy(self) -> str:
        """The array as a NumPy file in base64, as in vLLM."""
        file = io.BytesIO()
        np.save(file, self.array(), allow_pickle=False)
        return _base64(file.getbuffer())

    def int32(self) -> str:
        """The numbers of the array in 32 bits each, in base64, as in SGLang."""
        return _base64(memoryview(self.array().astype("<i4").tobytes()))


def _base64(data: memoryview) -> str:
    """In parts, because Python runs no other thread during each of them. Experts of long answers are many megabytes."""
    return "".join(b64encode(data[i : i + PART_BYTES]).decode() for i in range(0, len(data), PART_BYTES))
