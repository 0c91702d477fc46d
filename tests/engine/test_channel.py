from __future__ import annotations

import asyncio
import time
from pathlib import Path

from headgate.engine.channel import ClientChannel, EngineChannel
from headgate.protocol.message import PROTOCOL, EngineInfo, EngineStatus, Hello, StepOutputs, Submit, Welcome
from headgate.protocol.output import Outputs

INFO = EngineInfo(512, 260, (256,), 64, 16, 8, "none", "none", "none")


def test_a_message_that_arrives_during_a_send_is_received(tmp_path: Path):
    """ZeroMQ signals an arrival once, and a send consumes the signal: the receiver must check again itself."""

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
