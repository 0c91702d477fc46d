"""Measures the cost of a grammar per token: `python benchmarks/grammar_masks.py [VOCABULARY]`

For a synthetic byte-level vocabulary (default: 151,936 tokens): the time to compute the allowed tokens, to mask the
others in the logits, and to advance by the chosen token, per row and step, on one host thread.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headgate.contract.sampling import SamplingParams
from headgate.device.sampling.grammar import Grammars, read_vocabulary, unpack
from headgate.protocol.plan import Join, StepPlan
from headgate.text.constraints import json_object, json_schema

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PATTERN = PERSON | {"properties": PERSON["properties"] | {"name": {"type": "string", "pattern": "^[a-z ]{3,40}$"}}}
SAID = '{"name": "hello world this is", "age": 42, "tags": ["a", "bcd"]}'


def synthetic_tokenizer(size: int) -> Tokenizer:
    """Bytes, and words of random letters, so that masks walk a tree as large as that of a real vocabulary."""
    rng = random.Random(0)
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = "etaoinshrdlucmfwypvbgkjqxz" * 4 + 'ETAOINSHRDLU0123456789_-.,:;"{}[]()/'
    while len(vocab) < size - 1:
        word = rng.choice(["Ġ", "", ""]) + "".join(rng.choices(letters, k=rng.randint(2, 9)))
        vocab.setdefault(word, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


def microseconds(times_s: list[float]) -> str:
    return f"median {statistics.median(times_s) * 1e6:6.0f}, worst {max(times_s) * 1e6:6.0f} µs"


def timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def measure(grammars: Grammars, tokenizer: Tokenizer, grammar: str, vocab_size: int) -> None:
    join = Join(0, (1,), 1, SamplingParams(grammar=grammar), ())
    plan = StepPlan(0, 0, [], [], [], [], joins=(join,))
    joined_s = timed(lambda: grammars.apply(plan))
    again_s = timed(lambda: grammars.apply(plan))
    logits, rows = torch.randn(1, vocab_size), np.array([0])
    masks, forbids, advances = [], [], []
    for token in tokenizer.encode(SAID).ids:
        matcher = grammars._matchers[0]
        masks.append(timed(lambda matcher=matcher: grammars._masks([matcher])))
        mask = grammars._masks([matcher])
        forbids.append(
            timed(lambda mask=mask: torch.where(unpack(mask, vocab_size, logits.device), logits, -torch.inf))
        )
        advances.append(timed(lambda token=token: grammars.advance(rows, [token])))
    print(f"    join         {joined_s * 1e6:6.0f} µs the first time, {again_s * 1e6:.0f} µs once compiled")
    print(f"    mask         {microseconds(masks)}")
    print(f"    forbid       {microseconds(forbids)}")
    print(f"    advance      {microseconds(advances)}")


def main(vocab_size: int) -> None:
    torch.set_num_threads(1)
    tokenizer = synthetic_tokenizer(vocab_size)
    started_s = time.perf_counter()
    vocabulary = read_vocabulary(tokenizer.to_str(), vocab_size=vocab_size, eos_ids=(vocab_size - 1,))
    assert vocabulary is not None
    print(
        f"{vocab_size} tokens, read in {time.perf_counter() - started_s:.2f} s; per row and token of {json.dumps(SAID)}"
    )
    grammars = Grammars(vocabulary)
    for name, grammar in {
        "json_object": json_object(),
        "a schema": json_schema(PERSON),
        "a schema with a pattern": json_schema(PATTERN),
    }.items():
        print(f"  {name}")
        measure(grammars, tokenizer, grammar, vocab_size)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 151_936)
