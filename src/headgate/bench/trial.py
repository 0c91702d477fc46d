"""The settings that all benchmarks except `bench serve` have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from headgate.bench.client import address_of
from headgate.bench.load import first_model
from headgate.config import SYSTEM_CAS, TlsFiles
from headgate.errors import RequestError
from headgate.httpclient import HttpAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    url: str
    model: str | None = None  # None: the first model that the server lists
    api_key: str | None = field(default=None, repr=False)
    tls: TlsFiles = SYSTEM_CAS  # for https://
    timeout_s: float = 120.0  # longest duration of a request

    POSITIVE: ClassVar[tuple[str, ...]] = ()  # settings that must be at least 1

    def __post_init__(self) -> None:
        for name in self.POSITIVE:
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1")

    @property
    def address(self) -> HttpAddress:
        return address_of(self.url, self.tls)

    async def find_model(self) -> str:
        return self.model or await first_model(self.address, self.api_key)
