"""The requests that clients send: a small, varied set, whose answers are recorded before faults are injected."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = ("gate", "weir", "sluice", "Schütz", "écluse", "水门", "😀", "river", "and", "then", "under", "of")
RETURN_DETAILS = {"return_token_ids": True, "return_weight_versions": True}


@dataclass(frozen=True, slots=True)
class CatalogueItem:
    number: int
    path: str
    body: dict[str, Any]

    @property
    def choices(self) -> int:
        return int(self.body.get("n", 1))

    @property
    def streamed(self) -> bool:
        return bool(self.body["stream"])


def catalogue(seed: int, count: int = 48) -> list[CatalogueItem]:
    """Return chat and completion requests, streamed or not, greedy or sampled.

    Some have a long prompt, two choices or an early end-of-sequence token.
    """
    rng = random.Random(seed)
    return [_item(number, rng) for number in range(count)]


def _item(number: int, rng: random.Random) -> CatalogueItem:
    long = number % 6 == 4  # long enough that a prefill server computes the prompt
    text = " ".join(rng.choices(WORDS, k=240 if long else rng.randint(2, 20)))
    body: dict[str, Any] = {
        "stream": number % 3 != 2,
        "max_tokens": rng.randint(60, 500),
        "ignore_eos": number % 8 != 7,
        "seed": rng.randrange(2**32),
        "temperature": rng.choice((0.0, 0.8, 1.0)),
        **RETURN_DETAILS,
    }
    if number % 7 == 5:
        body["n"] = 2
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if number % 2:
        return CatalogueItem(number, CHAT, body | {"messages": [{"role": "user", "content": text}]})
    return CatalogueItem(number, COMPLETIONS, body | {"prompt": text})
