"""Access control: which callers may use which path, on servers and routers alike.

Paths are written as in the routing tables. A path that is not declared here belongs to the admin, so a route that was
forgotten is closed; `tests/test_access_table.py` fails for it.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from headgate.dashboard import page


class Access(Enum):
    OPEN = "open"  # probes and scrapers have no key, and the page of the dashboard asks for one
    TENANT = "tenant"  # callers with a key; any caller where there are no API keys
    ADMIN = "admin"


# Requests for these take places of a server.
GENERATING: Final = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate", "/inference/v1/generate")
)

DECLARED: Final[dict[str, Access]] = {
    **dict.fromkeys(("/live", "/ready", "/health", "/metrics", "/openapi.json", "/version"), Access.OPEN),
    **dict.fromkeys(page.ASSETS, Access.OPEN),
    **dict.fromkeys(
        (
            *GENERATING,
            "/v1/embeddings",
            "/tokenize",
            "/detokenize",
            "/v1/models",
            "/v1/models/{model:path}",
            "/v1/abort_requests",
            "/v1/requests",
            "/v1/requests/{id:path}",
            "/v1/is_paused",
            "/v1/loads",
            "/abort_request",
            "/model_info",
            "/get_model_info",
            "/server_info",
            "/get_server_info",
            "/health_generate",
            "/is_paused",
            "/is_sleeping",
            "/get_world_size",
            page.EVENTS,
            page.NUMBERS,
        ),
        Access.TENANT,
    ),
    **dict.fromkeys(
        (
            "/v1/pause",
            "/v1/resume",
            "/v1/update_weights",
            "/v1/sleep",
            "/v1/wakeup",
            "/v1/flush_cache",
            "/v1/workers",
            "/v1/workers/{url:path}",
            "/v1/scale",
            "/pause",
            "/resume",
            "/sleep",
            "/wake_up",
            "/reset_prefix_cache",
            "/init_weight_transfer_engine",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/pause_generation",
            "/continue_generation",
            "/update_weights_from_disk",
            "/update_weights_from_distributed",
            "/update_weights_from_tensor",
            "/init_weights_update_group",
            "/destroy_weights_update_group",
            "/flush_cache",
            "/release_memory_occupation",
            "/resume_memory_occupation",
        ),
        Access.ADMIN,
    ),
}

_BELOW: Final = {path.partition("{")[0]: access for path, access in DECLARED.items() if "{" in path}


def access_of(path: str) -> Access:
    """`path` as it was asked for, decoded."""
    declared = DECLARED.get(path)
    if declared is not None:
        return declared
    return next((access for prefix, access in _BELOW.items() if path.startswith(prefix)), Access.ADMIN)
