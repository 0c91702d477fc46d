"""A journal read as a router reads it: from the bytes of an answer to the `resume` of the request that goes on with it.

Written from docs/decisions/0006-the-journal.md alone; nothing of the server's own code is used.
"""

from __future__ import annotations

from typing import Any


def blocks(body: bytes) -> list[bytes]:
    """The whole blocks of `body`, each with its empty line; what was cut off in the middle is left out."""
    whole, block = [], b""
    for part in body.split(b"\n\n")[:-1]:
        block += part + b"\n\n"
        if b":+" not in part.split(b"\n"):  # that goes with the next one
            whole.append(block)
            block = b""
    return whole


def resume_of(told: list[bytes], *, stream: bool) -> dict[str, Any]:
    """What to send to the server that goes on after these blocks."""
    choices: dict[int, dict[str, Any]] = {}
    for line in b"".join(told).decode().split("\n"):
        kind, _, rest = line.partition(" ")
        if kind not in (":j", ":f"):
            continue
        index, *words = rest.split(" ")
        empty = {"index": int(index), "token_ids": [], "versions": [], "delivered_chars": 0, "finish": None}
        choice = choices.setdefault(int(index), empty)
        if kind == ":f":
            choice["finish"] = [words[0], words[1], *map(int, words[2:])]
            continue
        ids = [int(id) for id in words[2].split(",")]
        choice["token_ids"] += ids
        choice["versions"].append([int(words[0]), len(ids)])
        choice["delivered_chars"] = int(words[1]) if stream else 0
    return {"choices": list(choices.values())}


def shown(body: bytes) -> bytes:
    """What a client sees: no comments, and no blocks that are nothing else."""
    kept = []
    for block in body.split(b"\n\n")[:-1]:
        lines = [line for line in block.split(b"\n") if line and not line.startswith(b":")]
        kept += [b"\n".join(lines) + b"\n\n"] if lines else []
    return b"".join(kept)


def unveiled(body: bytes) -> bytes:
    """What a client gets in the end if nobody goes on."""
    lines = [line.removeprefix(b":m ") for line in body.split(b"\n") if line.startswith(b":m ")]
    return b"".join(line + b"\n" for line in lines if not line.startswith((b":j ", b":f ")))
