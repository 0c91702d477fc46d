"""Operations of the dashboard, and the page that leads to it. They serve browsers and are not part of the API."""

from __future__ import annotations

from typing import Any, Final

from headgate.contract.operations.operation import Access, FanOut, Operation, RouterHandler
from headgate.dashboard import page


def _page(path: str, summary: str, access: Access, fan_out: FanOut | None, answer: Any = str) -> Operation:
    return Operation(
        method="GET",
        path=path,
        summary=summary,
        answer=answer,
        access=access,
        fan_out=fan_out,
        in_api=False,
    )


ROOT: Final = _page(page.ROOT, "Lead to the dashboard and the API description", Access.OPEN, RouterHandler())
ASSETS: Final = tuple(_page(path, "A file of the dashboard", Access.OPEN, RouterHandler()) for path in page.ASSETS)
EVENTS: Final = _page(page.EVENTS, "Stream updates to the dashboard", Access.TENANT, RouterHandler())
NUMBERS: Final = _page(page.NUMBERS, "This server's counts, for a router's dashboard", Access.TENANT, None, Any)
