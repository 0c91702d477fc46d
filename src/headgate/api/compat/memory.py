"""Sleep and wake-up as trainers on the engine's own device expect them of SGLang and vLLM.

Such a trainer releases all memory, takes a training step, wakes the weights, sends new ones, continues generation and
wakes the KV cache last. Weights that arrived over a wire have no file to be read from, so they stay asleep until the
new ones arrive, which wakes them. Requests wait until everything is awake.
"""

from __future__ import annotations

from collections.abc import Sequence

from headgate.api.control.lifecycle import Controls, followed
from headgate.contract.orders import UNORDERED, Order
from headgate.errors import RequestError
from headgate.protocol.command import Tag


async def wake(controls: Controls, tags: Sequence[Tag]) -> None:
    """Wake `tags`. If only weights are to be woken and their source is gone, they stay asleep until an update."""
    try:
        followed(await controls.wake(tags))
    except RequestError as error:
        if error.code != "source_lost" or tuple(tags) != ("weights",):
            raise


async def wake_and_resume(controls: Controls, tags: Sequence[Tag]) -> None:
    """Wake `tags`, and resume if nothing else is asleep."""
    if tags:
        await wake(controls, tags)
    await resume_unless_asleep(controls)


async def resume_unless_asleep(controls: Controls, order: Order = UNORDERED) -> None:
    """Resume. While memory is asleep nothing happens: waking the last part of it resumes."""
    try:
        followed(await controls.resume(order=order))
    except RequestError as error:
        if error.code != "asleep":
            raise
