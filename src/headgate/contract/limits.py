"""Ranges of numbers that several request bodies use, and limits that servers and routers share."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0, le=86400)]
Count = Annotated[int, Meta(ge=0, le=2**53)]

MOST_CHOICES = 1024  # answers to one request: the number of prompts times `n`
