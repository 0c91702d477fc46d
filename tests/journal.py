"""An independent reader of journals: turns the bytes of an answer into the `resume` field of the next request.

It is written from docs/decisions/0006-the-journal.md alone and uses none of the server's code.
"""

from __future__ import annotations

from typing import Any


def blocks(body: bytes) -> list[bytes]:
    """The complete blocks of `body`, each with its empty line; a truncated last block is left out."""
    whole, block = [], b""
    for part in body.split(b"\n\n")[:-1]:
        block += part + b"\n\n"
        if b":+" not in part.split(b"\n"):  # bound to the next block
            whole.append(block)
            block = b""
    return whole


def resume_of(sent: list[bytes], *, stream: bool) -> dict[str, Any]:
    """The `resume` field for the server that continues after these blocks."""
    choices: dict[int, dict[str, Any]] = {}
    for line in b"".join(sent).decode().split("\n"):
        kind, _, rest = line.partition(" ")
        if kind not in (":j", ":f"):
            continue
        index, *fields = rest.split(" ")
        empty = {"index": int(index), "token_ids": [], "versions": [], "delivered_chars": 0, "finish": None}
        choice = choices.setdefault(int(index), empty)
        if kind == ":f":
            choice["finish"] = [fields[0], fields[1], *map(int, fields[2:])]
            continue
        ids = [int(id) for id in fields[2].split(",")]
        choice["token_ids"] += ids
        choice["versions"].append([int(fields[0]), len(ids)])
        choice["delivered_chars"] = int(fields[1]) if stream else 0
    return {"choices": list(choices.values())}


def shown(body: bytes) -> bytes:
    """Return the part of an answer that a client sees: the events, without comments."""
    kept = []
    for block in body.split(b"\n\n")[:-1]:
        lines = [line for line in block.split(b"\n") if line and not line.startswith(b":")]
        kept += [b"\n".join(lines) + b"\n\n"] if lines else []
    return b"".join(kept)


def unveiled(body: bytes) -> bytes:
    """Return the withheld events, which a client gets if no other server continues the answer."""
    lines = [line.removeprefix(b":m ") for line in body.split(b"\n") if line.startswith(b":m ")]
    return b"".join(line + b"\n" for line in lines if not line.startswith((b":j ", b":f ")))
