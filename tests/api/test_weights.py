"""New weights, sleep and flush through HTTP, under load, on two engines. Numbers are guarantees of docs/lifecycle.md."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headgate.testing.tiny import tiny_model
from tests.api.clients import Missed, Told, asking, begun, post, streaming, unless_missed, until
from tests.api.live import LiveServer, live_server
from tests.api.test_pause import is_paused, pause, resume, running

NORM = "model.norm.weight"
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("old"), max_position_embeddings=8192)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("new"), seed=1, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def server(old: Path) -> Iterator[LiveServer]:
    with live_server(old, device="cpu", kv_blocks=512, max_running=8, count=2) as server:
        yield server


@pytest.fixture(autouse=True)
def clean(server: LiveServer, old: Path) -> Iterator[None]:
    """Every test begins and ends with the old weights, running."""
    yield

    async def main() -> None:
        await pause(server)
        await update(server, old)
        await post(server.url, "/v1/wakeup")
        assert (await resume(server)).result["state"] == "running"

    asyncio.run(main())


async def update(server: LiveServer, path: Path, **more: Any) -> Told:
    return await post(server.url, "/v1/update_weights", {"path": str(path), **more})


async def answer(server: LiveServer, prompt: str = "hello") -> list[int]:
    told = await post(server.url, "/v1/completions", asking(24, prompt=prompt))
    assert told.status == 200, told
    return told.body["choices"][0]["completion_token_ids"]


def test_25_weights_are_refused_unless_paused(server: LiveServer, new: Path):
    async def main() -> None:
        refused = await update(server, new)
        assert refused.status == 409 and refused.body["error"]["code"] == "not_paused"
        assert (await post(server.url, "/v1/sleep", {})).body["error"]["code"] == "not_paused"

    asyncio.run(main())


def test_25_26_27_after_an_update_under_load_a_response_reports_the_weights_of_each_token(
    server: LiveServer, old: Path, new: Path
):
    async def main(longer: int) -> None:
        before, tokens = await answer(server), 900 * longer
        bodies = [asking(tokens, prompt=f"{i} once") for i in range(10)]
        async with streaming(server.url, bodies) as received:
            await begun(received)
            await pause(server, mode="freeze")
            if await running(server) != 10:
                await resume(server)
                raise Missed
            version = (await is_paused(server))["weight_version"]
            checksum = hashlib.sha256((new / "model.safetensors").read_bytes()).hexdigest()
            told = await update(server, new, verify_checksum={"model.safetensors": checksum})
            assert told.status == 200 and told.result["weight_version"] == version + 1
            assert told.result["checksum"] == {"model.safetensors": checksum}
            assert [engine["weight_version"] for engine in told.result["engines"]] == [version + 1] * 2
            await resume(server)
        for each in received:
            assert len(each.versions) == len(each.tokens) == tokens
            assert each.versions == sorted(each.versions) and set(each.versions) == {version, version + 1}
        after = await answer(server)
        assert after != before and await answer(server) == after, "nothing that the old weights cached is hit"
        await pause(server)
        await update(server, old)
        await resume(server)
        assert await answer(server) == before

    unless_missed(main)


def test_25_the_same_weights_in_the_middle_of_seeded_streams_change_nothing(server: LiveServer, old: Path):
    async def main() -> None:
        bodies = [asking(300, prompt=f"tale {i}", temperature=1, seed=i) for i in range(16)]
        async with streaming(server.url, bodies) as undisturbed:
            pass
        async with streaming(server.url, bodies) as received:
            await begun(received)
            await pause(server, mode="freeze")
            assert (await update(server, old, kv="recompute")).status == 200
            await resume(server)
        assert [each.tokens for each in received] == [each.tokens for each in undisturbed]

    asyncio.run(main())


def missing(tensors: Tensors) -> None:
    del tensors[NORM]


def wrong_shape(tensors: Tensors) -> None:
    tensors[NORM] = np.zeros(65, np.float32)


def wrong_dtype(tensors: Tensors) -> None:
    tensors[NORM] = np.zeros(64, np.int8)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (missing, f"lacks tensor {NORM}"),
        (wrong_shape, f"tensor {NORM} has shape [65]"),
        (wrong_dtype, f"tensor {NORM} has dtype int8"),
        (truncated, f"tensor {NORM} ends at"),
        (corrupt, "has SHA-256"),
    ],
)
def test_25_a_bad_update_under_load_reports_its_error_and_the_old_weights_keep_serving(
    server: LiveServer, new: Path, tmp_path: Path, spoil: Callable[[Any], None], reason: str
):
    tensors, path = load_file(new / "model.safetensors"), tmp_path / "model.safetensors"
    if spoil in (truncated, corrupt):
        save_file(tensors, path)
        checksum = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}
        spoil(path)
    else:
        spoil(tensors)
        save_file(tensors, path)
        checksum = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}

    async def main() -> None:
        before = await answer(server)
        version = (await is_paused(server))["weight_version"]
        async with streaming(server.url, [asking(500) for _ in range(6)]) as received:
            await begun(received)
            await pause(server, mode="freeze")
            refused = await update(server, path, verify_checksum=checksum)
            assert refused.status == 400 and refused.body["error"]["code"] == "bad_weights"
            assert reason in refused.body["error"]["message"]
            now = await is_paused(server)
            assert (now["state"], now["weight_version"]) == ("paused", version)
            await resume(server)
        assert {each.end for each in received} == {("length", "max_tokens")}
        assert {version for each in received for version in each.versions} == {version}
        assert await answer(server) == before

    asyncio.run(main())


def test_25_a_missing_file_and_a_version_that_is_not_new_are_refused(server: LiveServer, old: Path, tmp_path: Path):
    async def main() -> None:
        await pause(server)
        assert (await update(server, tmp_path / "nothing")).status in (400, 502)
        assert (await update(server, tmp_path / ("x" * 300))).status in (400, 502)
        huge = {"update_info": {"path": str(old), "version": 2**64}}
        for told in (await update(server, old, version=10**18), await post(server.url, "/update_weights", huge)):
            assert told.status == 400 and told.body["error"]["param"] == "version", told
        assert (await update(server, old, version=0)).body["error"]["code"] == "stale_version"
        both = {"path": str(old), "group": {"init_method": "tcp://127.0.0.1:1", "world_size": 3}}
        for body in ({}, both, {"group": {"init_method": "http://x", "world_size": 3}}):
            assert (await post(server.url, "/v1/update_weights", body)).status == 400
        await resume(server)

    asyncio.run(main())


def test_24_25_during_a_weight_update_nothing_else_changes_the_state_of_an_engine(server: LiveServer, old: Path):
    """A group whose trainer never joins keeps the engines updating until the group's timeout."""

    async def main(longer: int) -> None:
        await pause(server)
        group = {"init_method": "tcp://127.0.0.1:9", "world_size": 3, "timeout": 1.5 * longer}
        updating = asyncio.create_task(post(server.url, "/v1/update_weights", {"group": group}))

        async def moving() -> bool:
            return updating.done() or (await is_paused(server))["state"] == "updating"

        await until(moving)
        told = [await resume(server), await pause(server), await update(server, old)]
        if updating.done():
            raise Missed
        assert [refused.status for refused in told] == [409] * 3
        assert (await updating).status == 502
        now = await is_paused(server)
        assert now["state"] == "paused" and now["is_paused"]
        assert (await resume(server)).result["state"] == "running"
        await answer(server)

    unless_missed(main)


def test_sleep_releases_memory_and_wakeup_allocates_it_again(server: LiveServer):
    async def main() -> None:
        before = await answer(server)
        await pause(server)
        slept = await post(server.url, "/v1/sleep", {"tags": ["weights", "kv_cache"]})
        assert set(slept.result["asleep"]) == {"weights", "kv_cache"}
        assert (await resume(server)).body["error"]["code"] == "asleep"
        woken = await post(server.url, "/v1/wakeup", {"tags": ["kv_cache"]})
        assert woken.result["asleep"] == ["weights"]
        assert (await post(server.url, "/v1/wakeup", {})).result["asleep"] == []
        await resume(server)
        assert await answer(server) == before

    asyncio.run(main())


def test_26_a_flush_drops_cached_blocks_whenever_nothing_holds_them(server: LiveServer):
    async def main() -> None:
        for i in range(4):
            await answer(server, prompt=f"{i} " + "words " * 20)
        dropped = await post(server.url, "/v1/flush_cache")
        assert dropped.status == 200 and dropped.result["blocks"] > 0 and dropped.result["state"] == "running"
        assert (await post(server.url, "/v1/flush_cache")).result["blocks"] == 0

    asyncio.run(main())
