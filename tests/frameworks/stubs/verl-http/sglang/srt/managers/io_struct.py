"""The arguments of an update by handles."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class UpdateWeightsFromTensorReqInput:
    serialized_named_tensors: list[bytes]
    load_format: str | None = None
    flush_cache: bool = True
