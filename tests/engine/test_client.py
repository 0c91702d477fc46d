"""The engine client against a real channel and a real loop, in threads of this process."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from headgate.contract.sampling import SamplingParams
from headgate.engine.channel import EngineChannel
from headgate.engine.client import MOST_IDS, UNREAD_TOKENS, WOKEN_AT_ONCE, EngineClient, TokenStream, connected
from headgate.errors import EngineDead, RequestError
from headgate.protocol.message import Abort, EngineInfo, Submit, Suspend
from headgate.protocol.request import GenerateRequest
from headgate.testing.device import expected_vector
from tests.engine.test_loop import Harness, answer, prompt_of

INFO = EngineInfo(100, 1000, (), 32, 4, 4, "fake", "fake", "none")


class Stage:
    """A loop with the fake device in one thread, its channel in another, and the messages that the channel got."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.harness = Harness(**options)  # type: ignore[arg-type]
        self.received: list[Submit | Abort] = []
        self.address = f"ipc://{folder}/engine.sock"
        self.channel = EngineChannel(self.address, INFO, post=self._post, status=self.harness.loop.quiet)
        self.harness.loop._send = self.channel.send
        self.thread = threading.Thread(target=self.harness.loop.run)

    def _post(self, message: Submit | Abort) -> None:
        self.received.append(message)
        self.harness.loop.post(message)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[EngineClient]:
        self.channel.start()
        self.thread.start()
        try:
            async with connected(self.address, 3, timeout_s=60) as client:
                yield client
        finally:
            self.harness.loop.close()
            self.thread.join(60)
            self.channel.close()

    async def until_idle(self) -> None:
        async with asyncio.timeout(60):
            while not self.harness.loop.idle or self.harness.loop.status.running:
                await asyncio.sleep(0.005)


def make_request(id: int, max_tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(0, prompt_of(id), SamplingParams(max_tokens=max_tokens))


async def collect(client: EngineClient, request: GenerateRequest) -> list[int]:
    async with client.generate(request) as stream:
        return [token async for chunk in stream for token in chunk.tokens]


def test_many_streams_each_get_their_own_answer(tmp_path):
    async def main() -> None:
        stage = Stage(tmp_path)
        async with stage.client() as client:
            answers = await asyncio.gather(*(collect(client, make_request(id)) for id in range(40)))
            assert answers == [answer(id, 4) for id in range(40)]
            assert client.open_streams == 0

    asyncio.run(main())


def test_a_vector_arrives_with_the_end(tmp_path):
    async def main() -> None:
        stage = Stage(tmp_path)
        request = msgspec.structs.replace(make_request(1, max_tokens=0), pooling="last")
        async with stage.client() as client, client.generate(request) as stream:
            (chunk,) = [chunk async for chunk in stream]
            assert chunk.vector == expected_vector(prompt_of(1), 0, "last")
            assert chunk.ended is not None and chunk.ended.cause == "max_tokens" and not chunk.tokens

    asyncio.run(main())


def test_62_an_unread_stream_of_a_tenant_suspends_its_sequence(tmp_path):
    async def main() -> None:
        stage = Stage(tmp_path, blocks=2600, max_context=10_000)
        request = msgspec.structs.replace(make_request(1, 9000), tenant="a")
        async with stage.client() as client, client.generate(request) as stream:
            while not any(isinstance(message, Suspend) for message in stage.received):
                await asyncio.sleep(0.001)
            # The launched step of the other stream has landed.
            assert await collect(client, make_request(2, 50)) == answer(2, 50)
            made = stream.made
            assert UNREAD_TOKENS <= made < 9000
            assert await collect(client, make_request(3, 50)) == answer(3, 50)
            assert stream.made == made
            assert len((await anext(stream)).tokens) == made
            assert (await anext(stream)).tokens  # it continues

    asyncio.run(asyncio.wait_for(main(), 60))


def test_62_a_stream_without_a_tenant_is_generated_whether_it_is_read_or_not(tmp_path):
    async def main() -> None:
        stage = Stage(tmp_path)
        async with stage.client() as client, client.generate(make_request(1, 90)) as stream:
            while not stream.done:
                await asyncio.sleep(0.001)
            assert (await anext(stream)).tokens == answer(1, 90)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_63_streams_of_one_tenant_do_not_wait_for_all_streams_of_another(tmp_path):
    async def main() -> None:
        stage = Stage(tmp_path)
        woken: list[str] = []

        async def read(stream: TokenStream, tenant: str) -> None:
            await anext(stream)
            woken.append(tenant)

        async with stage.client() as client, asyncio.TaskGroup() as tasks:
            streams = []
            for tenant in ["greedy"] * 20 * WOKEN_AT_ONCE + ["polite"]:
                stream = client._stream(msgspec.structs.replace(make_request(1), tenant=tenant))
                streams.append(stream)
                tasks.create_task(read(stream, tenant))
            await asyncio.sleep(0)
            for stream in streams:
                stream.add_token(1, 0, None)
        assert woken.index("polite") < 3 * WOKEN_AT_ONCE

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_slow_reader_gets_everything_in_one_chunk(tmp_path):
    async def main() -> None:
        stage = Stage(tmp_path)
        async with stage.client() as client, client.generate(make_request(1)) as stream:
            async with asyncio.timeout(60):
                while not stream.done:
                    await asyncio.sleep(0.001)
            chunk = await anext(stream)
            assert chunk.tokens == answer(1, 4) and chunk.ended is not None and chunk.ended.cause == "max_tokens"
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    asyncio.run(main())


def test_closing_a_stream_early_sends_exactly_one_abort(tmp_path):
    async def main() -> None:
        stage = Stage(tmp_path)
        async with stage.client() as client:
            async with client.generate(make_request(1, max_tokens=90)) as stream:
                await anext(stream)
            await stage.until_idle()
        aborts = [message for message in stage.received if isinstance(message, Abort)]
        assert len(aborts) <= 1 and stage.harness.scheduler.pool.held == 0

    asyncio.run(main())


def test_a_finished_stream_sends_no_abort(tmp_path):
    async def main() -> None:
        stage = Stage(tmp_path)
        async with stage.client() as client:
            await collect(client, make_request(1))
            await client.ping(60)
        assert not any(isinstance(message, Abort) for message in stage.received)

    asyncio.run(main())


def test_a_burst_of_disconnects_sends_few_messages_and_loses_no_abort(tmp_path):
    """Guarantee 13: aborts are coalesced, at most 1,024 ids each; none is lost or sent twice."""
    count = 1500

    async def main() -> None:
        stage = Stage(tmp_path, by_hand=True)
        async with stage.client() as client:
            tasks = [asyncio.create_task(collect(client, make_request(id))) for id in range(count)]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await client.ping(60)
        ids = [message.ids for message in stage.received if isinstance(message, Abort)]
        flat = [id for each in ids for id in each]
        assert len(flat) == len(set(flat)) == count and len(ids) <= 3 and max(map(len, ids)) <= MOST_IDS
        submits = [message for message in stage.received if isinstance(message, Submit)]
        assert sum(len(message.requests) for message in submits) == count and len(submits) <= 3
        stage.harness.executor.close()

    asyncio.run(main())


def test_a_refusal_is_raised_to_the_reader_of_the_stream(tmp_path):
    async def main() -> None:
        async with Stage(tmp_path).client() as client:
            with pytest.raises(RequestError, match="their sum may be at most 100") as refusal:
                await collect(client, make_request(1, max_tokens=1000))
            assert (refusal.value.status, refusal.value.param) == (400, "max_tokens")

    asyncio.run(main())


def test_a_lost_engine_ends_every_stream_and_refuses_new_ones(tmp_path):
    async def main() -> None:
        stage = Stage(tmp_path, by_hand=True)
        async with stage.client() as client:
            tasks = [asyncio.create_task(collect(client, make_request(id))) for id in range(3)]
            await asyncio.sleep(0.01)
            client.lose(EngineDead("gone"))
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert [str(end) for end in ends] == ["gone"] * 3
            with pytest.raises(EngineDead, match="gone"):
                await collect(client, make_request(9))
            with pytest.raises(EngineDead, match="gone"):
                await client.ping(1)
        stage.harness.executor.close()

    asyncio.run(main())


def test_a_ping_is_answered_while_a_step_runs(tmp_path):
    async def main() -> None:
        stage = Stage(tmp_path, by_hand=True)
        async with stage.client() as client:
            task = asyncio.create_task(collect(client, make_request(1, max_tokens=1)))
            async with asyncio.timeout(60):
                while not (await client.ping(60)).status.busy:
                    pass
            stage.harness.executor.land()
            assert await task == answer(1, 1)

    asyncio.run(main())


def test_an_engine_that_does_not_answer_is_declared_lost(tmp_path):
    async def main() -> None:
        with pytest.raises(EngineDead, match=r"has not answered in 0\.05 s"):
            async with connected(f"ipc://{tmp_path}/absent.sock", 0, timeout_s=0.05):
                raise AssertionError("connected to an address without an engine")

    asyncio.run(main())


def test_a_frame_that_cannot_be_read_is_dropped_and_logged(tmp_path, caplog):
    async def main() -> None:
        stage = Stage(tmp_path)
        async with stage.client() as client:
            with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.connect(stage.address)
                for frame in (b"", b"\xc1", msgspec.msgpack.encode(["submit", "no list"]), b"\x00" * 100):
                    stranger.send(frame)
                stranger.send(msgspec.msgpack.encode(["ping", 1]))
                assert stranger.poll(60_000)
            assert await collect(client, make_request(1)) == answer(1, 4)

    asyncio.run(main())
    assert sum("cannot be decoded" in record.message for record in caplog.records) == 4


def test_14_a_failed_send_is_logged_with_engine_and_ids_and_delays_no_other_request(tmp_path, caplog):
    async def main() -> None:
        broken, sound = Stage(tmp_path / "broken", by_hand=True), Stage(tmp_path / "sound")
        async with broken.client() as first, sound.client() as second:
            async with (
                first.generate(make_request(1)) as lost,
                second.generate(make_request(2, max_tokens=90)) as stream,
            ):
                await anext(stream)

                def refuse(*message: object) -> None:
                    raise zmq.ZMQError(zmq.EAGAIN)

                first._channel._outgoing = SimpleNamespace(send=refuse)
                id = lost.id
            await sound.until_idle()
            assert await collect(second, make_request(3)) == answer(3, 4)
            assert first.open_streams == 0
        (record,) = [record for record in caplog.records if "cannot be sent an abort" in record.message]
        assert str(tmp_path / "broken") in record.message and str(id) in record.message
        broken.harness.executor.close()

    for name in ("broken", "sound"):
        (tmp_path / name).mkdir()
    asyncio.run(main())


def test_10_ten_thousand_requests_finish_or_are_aborted_and_each_ends_once(tmp_path):
    """Guarantee 10; and guarantee 15: requests that have already ended are skipped."""
    count = 10_000

    async def main() -> None:
        stage = Stage(tmp_path, blocks=64)
        choose = random.Random(10)
        ends: Counter[str] = Counter()
        async with stage.client() as client:

            async def one(id: int) -> None:
                async with client.generate(make_request(id, max_tokens=choose.randrange(1, 6))) as stream:
                    way = choose.randrange(4)
                    if way == 0:
                        return  # disconnects at once
                    if way == 1:
                        await asyncio.sleep(choose.random() / 100)
                        client.abort(stream.id, "api_abort")
                    chunks = [chunk async for chunk in stream]
                    (ended,) = [chunk.ended for chunk in chunks if chunk.ended]
                    assert ended.output_tokens == sum(len(chunk.tokens) for chunk in chunks)
                    ends[ended.finish_reason] += 1

            for first in range(0, count, 2000):
                await asyncio.gather(*(one(id % 90) for id in range(first, first + 2000)))
            await stage.until_idle()
            assert client.open_streams == 0 and not client._aborts
        assert ends["length"] > 0 and ends["abort"] > 0
        scheduler = stage.harness.scheduler
        scheduler.check()
        assert scheduler.pool.held == 0 and not scheduler.sequences

    asyncio.run(main())
