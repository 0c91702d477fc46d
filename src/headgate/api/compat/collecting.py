"""An update that a trainer sends in parts, on all engines of a server.

Parts are collected while the engines serve or are paused. They become visible together: when the update is ended
(`/end_weight_update`, `/finish_weight_update`), when a paused server continues, or, if it was not paused, as soon as the
whole model has arrived. An update that is incomplete is refused at that moment, and the old weights stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from headgate.api.control.lifecycle import MARGIN_S, Controls
from headgate.errors import HeadgateError, RequestError
from headgate.protocol.command import (
    DEFAULT_TIMEOUT_S,
    Collected,
    CollectWeights,
    DiscardWeights,
    JoinGroup,
    LeaveGroup,
    Part,
)

PART_TIMEOUT_S = 300.0


class WeightCollection:
    """One per server. The engines have the parts; this records which update they belong to."""

    def __init__(self) -> None:
        self.open = False  # begun explicitly, so it ends explicitly
        self.parts = 0
        self.label: str | None = None
        self.recompute = True
        self.checksum: dict[str, str] = {}  # SHA-256 in hex by tensor name, of all parts

    async def join(self, controls: Controls, group: JoinGroup) -> None:
        self.forget()  # the engines drop what a group of this name has sent
        await controls.call(group, group.timeout_s + 2 * MARGIN_S)

    async def leave(self, controls: Controls, name: str) -> None:
        await controls.call(LeaveGroup(name), DEFAULT_TIMEOUT_S)

    def begin(self) -> None:
        if self.open:
            message = "an update has begun already; end it before another one"
            raise RequestError(message, code="update_in_progress")
        self.forget()
        self.open = True

    async def add(
        self,
        controls: Controls,
        part: Part,
        *,
        label: str | None,
        recompute: bool,
        paused: bool,
        checksum: Mapping[str, str] | None = None,
    ) -> Collected:
        """Collect a part on all engines. If one engine does not have it, all drop the update."""
        if label != self.label and self.parts and not self.open:
            await self.discard(controls, f"another update ({label}) has begun")
            self.checksum = {}
        self.parts, self.label, self.recompute = self.parts + 1, label, recompute
        self.checksum |= checksum or {}
        command = CollectWeights(part, anew=not (paused or self.open), timeout_s=PART_TIMEOUT_S)
        try:
            results = await controls.call(command, PART_TIMEOUT_S + 5)
        except HeadgateError as error:
            await self.discard(controls, str(error))
            raise
        return max((each for each in results.values() if isinstance(each, Collected)), key=lambda each: each.missing)

    async def discard(self, controls: Controls, reason: str) -> None:
        with suppress(HeadgateError):
            await controls.call(DiscardWeights(reason), DEFAULT_TIMEOUT_S)

    def forget(self) -> None:
        self.open, self.parts, self.label, self.recompute, self.checksum = False, 0, None, True, {}
