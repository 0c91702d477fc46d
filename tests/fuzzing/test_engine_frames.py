"""Frames between API and engine: no bytes make either process exit."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import strategies as st

from headgate.contract.sampling import SamplingParams
from headgate.engine.channel import UNREADABLE, ClientChannel, EngineChannel
from headgate.errors import EngineDead
from headgate.protocol.command import (
    BroadcastSource,
    FileSource,
    Flush,
    ListSequences,
    Pause,
    Resume,
    Sleep,
    Stop,
    UpdateWeights,
    Wake,
)
from headgate.protocol.message import (
    PROTOCOL,
    Abort,
    CommandAnswer,
    CommandCall,
    EngineInfo,
    EngineStatus,
    FromClient,
    Hello,
    Message,
    Ping,
    Pong,
    StepOutputs,
    Submit,
    Welcome,
)
from headgate.protocol.output import Ended, Outputs, Refused, Timings
from headgate.protocol.request import GenerateRequest, Ticket
from tests.engine.test_loop import Harness, answer
from tests.fuzzing.properties import damaged, fuzzed, replaced

INFO = EngineInfo(512, 260, (256,), 64, 16, 8, "none", "none", "none")
TICKET = Ticket("127.0.0.1:1", 5, 6, 4, 0, b"k" * 16)
REQUEST = GenerateRequest(
    9,
    (1, 2, 3),
    SamplingParams(max_tokens=3, logit_bias={4: 1.0}, stop_token_ids=(7,), logprobs=2),
    generated=(4,),
    timeout_s=5.0,
    salt="s",
    ticket=TICKET,
)
MESSAGES = (
    Hello(PROTOCOL, 0),
    Ping(3),
    Submit([REQUEST, GenerateRequest(10, (1,), SamplingParams(max_tokens=0), pooling="mean")]),
    Abort([9, 10], "api_abort"),
    *(
        CommandCall(0, 1, command)
        for command in (
            Pause("freeze"),
            Resume(),
            Flush(),
            ListSequences(),
            Sleep(),
            Wake(),
            Stop([9], "api_abort"),
            Stop(None, "pause"),
        )
    ),
    CommandCall(0, 2, UpdateWeights(FileSource("/nowhere", {"a": "b"}), 3)),
    CommandCall(0, 2, UpdateWeights(BroadcastSource("tcp://127.0.0.1:1", 2), 3)),
)
FROM_ENGINE = (
    Welcome(PROTOCOL, INFO),
    Pong(1, 0.0, EngineStatus(0.0, False)),
    StepOutputs(
        Outputs(
            ids=[1, 2],
            tokens=[3, 4],
            ended=[Ended(1, "stop", "eos", 1, 0, 1, Timings(0.0, None, None, 1.0))],
            refused=[Refused(5, 400, "x", "y")],
            vectors={1: bytes(8)},
        )
    ),
)
encode = msgspec.msgpack.encode


def frames(messages: tuple[Any, ...]) -> st.SearchStrategy[bytes]:
    """Frames of `messages`, damaged in their bytes or in their values."""
    whole = [encode(message) for message in messages]
    decoded = [msgspec.msgpack.decode(frame) for frame in whole]
    broken = st.sampled_from(whole).flatmap(damaged)
    changed = st.sampled_from(decoded).flatmap(replaced).map(packed)
    return st.one_of(broken, changed, st.sampled_from(whole), st.binary(max_size=40), st.just(b"\x91" * 2000))


def packed(value: Any) -> bytes:
    with suppress(OverflowError, RecursionError):
        return encode(value)
    return b""


@fuzzed(st.lists(st.lists(frames(MESSAGES), max_size=3), min_size=1, max_size=10), few=15)
def test_an_engine_answers_pings_after_any_frames(sent: list[list[bytes]]) -> None:
    with tempfile.TemporaryDirectory(prefix="headgate-") as folder, zmq.Context() as context:
        address = f"ipc://{folder}/e"
        posted: list[Message] = []
        engine = EngineChannel(address, INFO, post=posted.append, status=lambda: (0.0, EngineStatus(0.0, False)))
        engine.start()
        with context.socket(zmq.DEALER) as client:
            client.setsockopt(zmq.LINGER, 0)
            client.connect(address)
            for message in sent:
                client.send_multipart(message or [b""])
            client.send(encode(Ping(2**40)))
            try:
                while client.poll(20_000):
                    with suppress(*UNREADABLE):
                        answer = msgspec.msgpack.decode(client.recv(), type=Pong)
                        if answer.number == 2**40:
                            break
                else:
                    pytest.fail("no answer")
            finally:
                engine.close()
    assert all(isinstance(message, Message) for message in posted)


@fuzzed(st.lists(frames(MESSAGES), min_size=1, max_size=8), few=20)
def test_an_engine_keeps_running_after_any_decodable_message(sent: list[bytes]) -> None:
    harness = Harness()
    for frame in sent:
        with suppress(*UNREADABLE):
            message = msgspec.msgpack.decode(frame, type=FromClient)
            if isinstance(message, Message):
                harness.loop.post(message)
                harness.loop.post(CommandCall(0, 2**50, ListSequences()))  # so that the turn does not block
                harness.loop.turn()
    harness.clock.now_s += 10_000.0
    for command in (Stop(None, "shutdown", 0.0), Wake(), Resume()):
        harness.call(command)
    for _ in range(5):
        harness.loop.wake()
        harness.loop.turn()
    harness.scheduler.check()
    if harness.loop.control.state == "running" and harness.loop.status.version == 0:
        good = 2**39 + 5
        harness.submit(good)
        for _ in range(40):
            harness.loop.wake()
            harness.loop.turn()
        assert harness.tokens(good) == answer(good, 4)


@fuzzed(st.lists(frames(FROM_ENGINE), min_size=1, max_size=4), few=15)
def test_an_engine_that_sends_garbage_is_considered_dead_and_nothing_else_breaks(sent: list[bytes]) -> None:
    async def main(address: str) -> None:
        client = ClientChannel(address, 0)
        try:
            client.send(Hello(PROTOCOL, 0))
            for _ in sent:
                with suppress(EngineDead):
                    message = await asyncio.wait_for(client.receive(), 60)
                    assert isinstance(message, Welcome | Pong | StepOutputs | CommandAnswer)
        finally:
            client.close()

    def engine(socket: zmq.Socket[bytes]) -> None:
        if socket.poll(60_000):
            identity, _ = socket.recv_multipart()
            for frame in sent:
                socket.send_multipart([identity, frame])

    with tempfile.TemporaryDirectory(prefix="headgate-") as folder, zmq.Context() as context:
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address := f"ipc://{folder}/e")
        thread = threading.Thread(target=engine, args=(socket,))
        thread.start()
        asyncio.run(main(address))
        thread.join(60)
        socket.close()


@pytest.mark.parametrize(
    "frame", [b"\x93\xa5abort\x90\xa1\xff", b"\x92\xa5hel\xff\xff\x01"], ids=["a cause", "a tag"]
)
def test_invalid_utf8_is_dropped_like_any_invalid_frame(frame: bytes, tmp_path: Path):
    posted: list[Message] = []
    engine = EngineChannel(
        f"ipc://{tmp_path}/e", INFO, post=posted.append, status=lambda: (0.0, EngineStatus(0.0, False))
    )
    engine.start()
    try:
        engine._receive(b"client-1", frame)
        engine._receive(b"client-1", frame, frame, b"")
        engine._receive(b"client-1")
    finally:
        engine.close()
    assert posted == []
