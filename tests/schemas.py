"""Random JSON schemas, small enough that a model of random weights completes them."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

PATTERNS = ["^[a-z]{2,6}$", "^[A-Z][a-z]+-[0-9]{1,3}$", "^(red|green|blue)?$", "^\\d{4}-\\d{2}$", "^[^x\\s]{1,4}$"]
CONSTANTS: list[Any] = ["a", "b c", 'say "hi"', "é\n", 0, -7, 3.5, True, None, [], {"k": [1]}]


def random_schema(seed: int) -> Schema:
    rng = random.Random(seed)
    schema = _any(rng, depth=3)
    if rng.random() < 0.3:
        # A definition that is used twice, once inside itself.
        chain = {"type": "object", "properties": {"v": _leaf(rng), "next": {"$ref": "#/$defs/chain"}}}
        closed = {"required": ["v"], "additionalProperties": False}
        schema = {
            "type": "object",
            "properties": {"body": schema, "chain": {"$ref": "#/$defs/chain"}},
            "required": ["chain"],
            "additionalProperties": False,
            "$defs": {"chain": chain | closed},
        }
    return schema


def _any(rng: random.Random, depth: int) -> Schema:
    if depth == 0:
        return _leaf(rng)
    return rng.choice([_leaf, _object, _object, _array, _union])(rng, depth)


def _leaf(rng: random.Random, depth: int = 0) -> Schema:
    return rng.choice([_string, _string, _integer, _number, _enum, _simple])(rng)


def _string(rng: random.Random) -> Schema:
    if rng.random() < 0.4:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    shortest = rng.randrange(4)
    return {"type": "string", "minLength": shortest, "maxLength": shortest + rng.randrange(8)}


def _integer(rng: random.Random) -> Schema:
    low = rng.randrange(-1000, 1000)
    bounds = {"minimum": low, "maximum": low + rng.randrange(500)}
    if rng.random() < 0.3:
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": low + 2 + rng.randrange(100)}
    return {"type": "integer"} | bounds


def _number(rng: random.Random) -> Schema:
    low = round(rng.uniform(-50, 50), 2)
    return {"type": "number", "minimum": low, "maximum": round(low + rng.uniform(0.5, 90), 2)}


def _enum(rng: random.Random) -> Schema:
    return (
        {"enum": rng.sample(CONSTANTS, rng.randrange(1, 5))}
        if rng.random() < 0.7
        else {"const": rng.choice(CONSTANTS)}
    )


def _simple(rng: random.Random) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["id", "name", "größe", "a b", 'quo"te', "x-1", "list"], rng.randrange(1, 5))
    required = [name for name in names if rng.random() < 0.6]
    properties = {name: _any(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> Schema:
    fewest = rng.randrange(3)
    bounds = {"minItems": fewest, "maxItems": fewest + rng.randrange(3)}
    if rng.random() < 0.2:
        prefix = [_leaf(rng) for _ in range(2)]
        return {"type": "array", "prefixItems": prefix, "items": False, "minItems": 1}
    return {"type": "array", "items": _any(rng, depth - 1)} | bounds


def _union(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randrange(2, 4))]}
