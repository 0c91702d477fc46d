"""Splits the outputs of a step, so that each client gets one message per step."""

from __future__ import annotations

from collections.abc import Iterator

from headgate.protocol.message import client_of
from headgate.protocol.output import Outputs


def split_by_client(outputs: Outputs) -> Iterator[tuple[int, Outputs]]:
    """Yield each client with its share of the outputs. With a single client nothing is copied."""
    clients = {client_of(id) for id in _ids(outputs)}
    if len(clients) == 1:
        yield clients.pop(), outputs
        return
    for client in sorted(clients):
        yield client, _share(outputs, client)


def _ids(outputs: Outputs) -> Iterator[int]:
    yield from outputs.ids
    yield from outputs.prompt_logprobs
    yield from (ended.id for ended in outputs.ended)
    yield from (refused.id for refused in outputs.refused)
    yield from outputs.tickets
    yield from outputs.routed


def _share(outputs: Outputs, client: int) -> Outputs:
    mine = [i for i, id in enumerate(outputs.ids) if client_of(id) == client]
    return Outputs(
        version=outputs.version,
        ids=[outputs.ids[i] for i in mine],
        tokens=[outputs.tokens[i] for i in mine],
        logprobs={place: outputs.logprobs[i] for place, i in enumerate(mine) if i in outputs.logprobs},
        prompt_logprobs={id: scores for id, scores in outputs.prompt_logprobs.items() if client_of(id) == client},
        ended=[ended for ended in outputs.ended if client_of(ended.id) == client],
        refused=[refused for refused in outputs.refused if client_of(refused.id) == client],
        tickets={id: ticket for id, ticket in outputs.tickets.items() if client_of(id) == client},
        routed={id: experts for id, experts in outputs.routed.items() if client_of(id) == client},
        vectors={id: vector for id, vector in outputs.vectors.items() if client_of(id) == client},
    )
