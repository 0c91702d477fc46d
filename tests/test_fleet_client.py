"""The Python client against a real server: a trainer's calls, with the blocking and the async client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headgate.client import AsyncFleet, Fleet, FleetError, FleetLost
from headgate.device.weights.loading import SafetensorsFolder
from headgate.testing.tiny import tiny_model
from headgate.weights import publish
from tests.api.live import LiveServer, eventually, live_server

LONG = {"max_tokens": 15000, "temperature": 0, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("fleet"), max_position_embeddings=16384)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with live_server(folder, device="cpu", kv_blocks=1024, max_running=8) as server:
        yield server


@pytest.fixture
def fleet(server: LiveServer) -> Iterator[Fleet]:
    fleet = Fleet(server.url)
    yield fleet
    fleet.resume()
    fleet.wait_idle(60)


def test_an_aborted_answer_is_continued_from_its_own_tokens(server: LiveServer, fleet: Fleet):
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(fleet.generate, "hello", request_id="cut", logprobs=0, **LONG)
        assert eventually(lambda: any(each["output_tokens"] > 5 for each in fleet.requests()))
        assert set(fleet.abort("cut", "nobody").aborted) == {"cut"}
        cut = asked.result(60)
    assert cut.cut and cut.request_id == "cut" and len(cut.token_ids) == len(cut.logprobs) == len(cut.weight_versions)
    count = len(cut.token_ids) + 20
    whole = fleet.generate(after=cut, logprobs=0, **LONG | {"max_tokens": count})
    uninterrupted = fleet.generate("hello", logprobs=0, **LONG | {"max_tokens": count})
    assert whole.token_ids == uninterrupted.token_ids and whole.text == uninterrupted.text and not whole.cut
    assert whole.logprobs == pytest.approx(uninterrupted.logprobs, abs=1e-4) and len(whole.weight_versions) == count


def test_a_trainer_updates_the_weights_of_a_paused_fleet(fleet: Fleet, tmp_path: Path):
    tensors = dict(SafetensorsFolder(tiny_model(tmp_path, seed=3, max_position_embeddings=16384)))
    before = fleet.generate("hello", **SHORT)
    version = fleet.state().weight_version + 1
    with pytest.raises(FleetError, match="pause it before") as refused, publish(tensors) as files:
        fleet.update_weights(files)
    assert (refused.value.status, refused.value.code) == (409, "not_paused")
    paused = fleet.pause("freeze")
    assert paused.is_paused and paused.state == "paused" and paused.mode == "freeze"
    with publish(tensors, checksum=True) as files:
        assert fleet.update_weights(files, version).weight_version == version
    fleet.resume()
    after = fleet.generate("hello", **SHORT)
    assert after.token_ids != before.token_ids and set(after.weight_versions) == {version}


def test_waiting_for_an_idle_fleet_times_out_with_the_remaining_requests(fleet: Fleet):
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(fleet.generate, "x", request_id="long", **LONG)
        assert eventually(lambda: bool(fleet.requests()))
        with pytest.raises(FleetLost, match=r"1 requests are still in flight after 0\.05 s: long"):
            fleet.wait_idle(0.05)
        fleet.abort(everything=True, wait=False)
        fleet.wait_idle(60)
        assert asked.result(60).cut


def test_the_async_client_has_the_same_calls(server: LiveServer, fleet: Fleet):
    async def main() -> None:
        other = AsyncFleet(server.url)
        asked = [asyncio.create_task(other.generate(f"{i}", tags={"run": "1"}, **LONG)) for i in range(6)]
        while len(await other.requests()) < 6:
            await asyncio.sleep(0.01)
        leaving = asyncio.create_task(other.generate("leaves", **LONG))
        while len(await other.requests()) < 7:
            await asyncio.sleep(0.01)
        leaving.cancel()
        assert len((await other.abort(tags={"run": "1"})).aborted) == 6
        assert all(sample.cut for sample in await asyncio.gather(*asked))
        await other.wait_idle(60)
        assert (await other.pause()).state == "paused"
        with pytest.raises(FleetError) as refused:
            await other.generate("x", **SHORT)
        assert (refused.value.status, refused.value.code) == (503, "paused")
        assert (await other.resume()).state == (await other.state()).state == "running"
        assert (await other.generate("hello", **SHORT)).text == fleet.generate("hello", **SHORT).text

    asyncio.run(main())


def test_an_unreachable_address_raises_fleet_lost():
    with pytest.raises(FleetLost, match=r"127\.0\.0\.1:9"):
        Fleet("http://127.0.0.1:9").state()
    with pytest.raises(FleetLost, match=r"127\.0\.0\.1:9"):
        asyncio.run(AsyncFleet("http://127.0.0.1:9").state())
