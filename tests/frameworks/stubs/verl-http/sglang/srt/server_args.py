"""The address of a server. SGLang has many more fields, which the adapter does not read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ServerArgs:
    model_path: str
    host: str
    port: int
    trust_remote_code: bool = False
    node_rank: int = 0
    is_embedding: bool = False
    api_key: str | None = None

    def url(self) -> str:
        return f"http://{self.host}:{self.port}"
