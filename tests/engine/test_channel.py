from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from headgate.engine.channel import ClientChannel, EngineChannel
from headgate.errors import EngineDead
from headgate.protocol.message import PROTOCOL, Abort, EngineInfo, EngineStatus, Hello, StepOutputs, Submit, Welcome
from headgate.protocol.output import Outputs

INFO = EngineInfo(512, 260, (256,), 64, 16, 8, "none", "none", "none")


def test_a_message_that_arrives_during_a_send_is_received(tmp_path: Path):
    """ZeroMQ signals an arrival only once, and a send may consume the signal, so the receiver must check again."""

    async def main() -> None:
        address = f"ipc://{tmp_path}/engine.sock"
        engine = EngineChannel(address, INFO, post=lambda _: None, status=lambda: (0.0, EngineStatus(0.0, False)))
        engine.start()
        client = ClientChannel(address, 0)
        client.send(Hello(PROTOCOL, 0))
        assert isinstance(await asyncio.wait_for(client.receive(), 60), Welcome)
        receiving = asyncio.create_task(client.receive())
        await asyncio.sleep(0.05)  # the receiver waits now
        engine.send(0, StepOutputs(Outputs(ids=[1], tokens=[2])))
        time.sleep(0.2)  # noqa: ASYNC251 - the message arrives while the event loop does something else
        client.send(Submit([]))
        try:
            assert isinstance(await asyncio.wait_for(receiving, 60), StepOutputs)
        finally:
            client.close()
            engine.close()

    asyncio.run(main())


def test_48_a_closed_channel_sends_nothing_to_the_next_engine_at_its_address(tmp_path: Path):
    async def main() -> None:
        client = ClientChannel(f"ipc://{tmp_path}/engine.sock", 0)
        client.close()
        with pytest.raises(EngineDead):
            client.send(Abort([1], "api_abort"))

    asyncio.run(main())
