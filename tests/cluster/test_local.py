"""A local fleet that is scaled while it serves: on request, and automatically."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from headgate.client import AsyncFleet
from headgate.testing.tiny import tiny_model
from tests.api.serving import Served, up, wait_until
from tests.cluster.machines import below, gone
from tests.router.test_kill import Asking, differences, requests
from tests.router.test_up import is_running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

LONG = {"max_tokens": 1500, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("local") / "tiny", max_position_embeddings=4096)


@pytest.fixture
def fleet(model: Path, tmp_path: Path) -> Iterator[Served]:
    file = tmp_path / "fleet.toml"
    file.write_text(f'model = "{model}"\n[mixed]\ncount = 2\nserve = ["--kv-blocks", "1024"]\n')
    with up("--fleet", file, "--drain-timeout", 10) as fleet:
        yield fleet


def test_44_scaling_up_and_down_under_load_breaks_no_stream(fleet: Served):
    asked = requests(16, 300)
    client = AsyncFleet(fleet.url)

    async def ask_while(salt: str, action: Callable[[], Awaitable[object]], wanted: list) -> None:
        asking = Asking(fleet.url, asked, salt)
        async with asyncio.timeout(200):
            answering = asyncio.create_task(asking.all())
            while sum(count > 3 for count in asking.events) < 6:
                await asyncio.sleep(0.01)
            await action()
            assert differences(await answering, wanted) == []

    async def main() -> None:
        wanted = await Asking(fleet.url, asked, "alone").all()
        await ask_while("grown", lambda: client.scale({"mixed": 3}), wanted)
        assert (await client.size()).ready["mixed"] == 3
        before = below(fleet.process.pid)
        await ask_while("shrunk", lambda: client.scale({"mixed": 1}), wanted)
        size = await client.size()
        assert size.ready["mixed"] == 1 == size.wanted["mixed"] and size.done
        assert len(list(filter(is_running, before))) <= len(before) - 4  # two servers, and their engines

    asyncio.run(main())
    everything = below(fleet.process.pid)
    assert fleet.stop() == 0
    gone(everything)
    assert not any("Traceback" in message for message in fleet.messages())


def test_the_fleet_autoscales_up_when_requests_wait_and_down_when_they_do_not(model: Path):
    flags = ("--autoscale", "mixed=1:2", "--max-running", 2, "--kv-blocks", 512)
    with up(model, *flags) as fleet:
        client = AsyncFleet(fleet.url)

        async def keep_asking(until: asyncio.Event) -> None:
            while not until.is_set():
                await client.generate("hello", **LONG)

        async def main() -> None:
            over = asyncio.Event()
            async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
                for _ in range(12):
                    tasks.create_task(keep_asking(over))
                while (await client.size()).ready["mixed"] < 2:
                    await asyncio.sleep(0.2)
                over.set()

        asyncio.run(main())
        with fleet.client() as http:
            refused = http.post("/v1/scale", json={"mixed": 3})
            assert refused.status_code == 400 and "between 1 and 2" in refused.json()["error"]["message"]
            wait_until(lambda: len(http.get("/v1/workers").json()["workers"]) == 1, 200)
        decided = [message for message in fleet.messages() if message.startswith("autoscale: ")]
        assert [" ".join(message.split()[1:5]) for message in decided] == ["mixed 1 -> 2", "mixed 2 -> 1"]
