"""Operations that are compatible with the server of `trl vllm-serve` (TRL up to 1.10). Their paths end with a slash.

Later versions of TRL use vLLM's API.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from headgate.contract.operations.operation import Access, AskAll, Operation, Relay, RouterHandler
from headgate.contract.operations.other_system import named_by
from headgate.contract.trl import TrlConversations, TrlPrompts, TrlSequences

_trl = partial(named_by, "TRL")


def _generation(path: str, body: type) -> Operation:
    return _trl("POST", path, Access.TENANT, Relay(), body=body, generates=True, restarts=True)


GENERATE: Final = _generation("/generate/", TrlPrompts)
CHAT: Final = _generation("/chat/", TrlConversations)
GET_SEQUENCE_LOGPROBS: Final = _generation("/get_sequence_logprobs/", TrlSequences)
HEALTH: Final = _trl("GET", "/health/", Access.OPEN, RouterHandler())
GET_WORLD_SIZE: Final = _trl("GET", "/get_world_size/", Access.TENANT, RouterHandler())
RESET_PREFIX_CACHE: Final = _trl("POST", "/reset_prefix_cache/", Access.ADMIN, AskAll(drops_prefixes=True))
