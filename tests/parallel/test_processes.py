"""Ranks as real processes: they answer like one, and a rank that dies or hangs leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from headgate import LLM, SamplingParams
from headgate.cli import parser
from headgate.cli.serve import engine_config
from headgate.config import EngineConfig
from headgate.device.tensor_parallel import followers, parallelism
from headgate.engine.replicas import Replica, Replicas, started
from headgate.errors import EngineDead, RankLost, RequestError
from headgate.protocol.command import EngineState, FileSource, Pause, Resume, UpdateWeights
from headgate.testing.tiny import tiny_model
from tests.api import serving
from tests.api.serving import wait_until
from tests.engine.test_replicas import collect, until

LONG_S = 60.0
CONFIG = EngineConfig(max_running=8, max_context=512, tensor_parallel=2, dtype="float32", device="cpu")
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(seed=5, max_tokens=12, ignore_eos=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def ranks_of(pid: int) -> list[int]:
    """Return the pids of an engine's other ranks."""
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [
        int(child) for each in lists for child in each.split() if "tensor_parallel.follower" in command_of(int(child))
    ]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return ""


def alive(pid: int) -> bool:
    """Whether a process runs. One that has ended and was not yet waited for has no command line."""
    return command_of(pid) != ""


def tokens_of(llm: LLM) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate([[1, 2, 3], [4, 5]], PARAMS, progress=False)]


def test_two_rank_processes_answer_like_one_and_a_lost_rank_is_reported_while_idle(folder):
    with LLM(folder, dtype="float32", device="cpu", max_running=4) as llm:
        alone = tokens_of(llm)
    with LLM(folder, dtype="float32", device="cpu", max_running=4, tensor_parallel=2) as llm:
        assert tokens_of(llm) == alone
        (pid,) = ranks_of(os.getpid())
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: llm.engine.loop._failure is not None, LONG_S)
        with pytest.raises(RankLost, match=rf"rank 1 \(pid {pid}\) was killed by signal 9"):
            tokens_of(llm)
    assert not alive(pid) and ranks_of(os.getpid()) == []


def test_a_rank_that_cannot_start_is_an_error_and_leaves_nothing(folder, monkeypatch):
    monkeypatch.setattr(followers.sys, "executable", "/bin/false")
    before = set(threading.enumerate())
    with pytest.raises(RankLost, match=r"rank 1 .* ended with exit code 1"):
        LLM(folder, tensor_parallel=2, max_running=4)
    wait_until(lambda: set(threading.enumerate()) <= before, LONG_S)


def test_heads_that_cannot_be_divided_are_refused_before_anything_is_started(folder, monkeypatch):
    monkeypatch.setattr(parallelism, "Followers", None)
    with pytest.raises(RequestError, match="tensor_parallel is 3"):
        LLM(folder, tensor_parallel=3)


@pytest.mark.parametrize(
    ("flags", "culprit"),
    [(["--role", "decode"], "--role decode"), (["--kv-listen", "127.0.0.1:7000"], "--kv-listen 127.0.0.1:7000")],
)
def test_kv_transfer_with_several_ranks_is_refused_at_start_up(flags, culprit):
    options = parser().parse_args(["serve", "model", "--tensor-parallel", "2", *flags])
    with pytest.raises(RequestError, match=f"{culprit} and --tensor-parallel 2 cannot be combined"):
        engine_config(options)
    assert engine_config(parser().parse_args(["serve", "model", "--tensor-parallel", "2"])).tensor_parallel == 2


# -- with streams, and another engine to continue them ------------------------------------


async def running(replicas: Replicas, count: int) -> asyncio.Future[list[list[int]]]:
    """Streams, some of them on each of both engines."""
    streams = asyncio.gather(*(collect(replicas, seed, count) for seed in range(8)))
    async with asyncio.timeout(LONG_S):
        while any(each.client is None or each.client.open_streams < 4 for each in replicas.replicas):
            await asyncio.sleep(0.001)
    return streams


def pids_of(replica: Replica) -> list[int]:
    assert replica.pid is not None
    return [replica.pid, *ranks_of(replica.pid)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["follower", "rank 0"])
def test_36_streams_continue_on_another_engine_when_a_rank_is_killed_and_the_engine_restarts(folder, victim, caplog):
    async def main() -> None:
        async with asyncio.timeout(240), started(folder, CONFIG, count=2) as replicas:
            undisturbed = await asyncio.gather(*(collect(replicas, seed, 400) for seed in range(8)))
            first = replicas.replicas[0]
            pids = pids_of(first)
            assert len(pids) == 2
            streams = await running(replicas, 400)
            os.kill(pids[victim == "follower"], signal.SIGKILL)
            began_s = time.monotonic()
            await until(first, "down")
            took_s = time.monotonic() - began_s
            assert await streams == undisturbed
            async with asyncio.timeout(LONG_S):
                while any(map(alive, pids)):
                    await asyncio.sleep(0.02)
            print(f"{victim} killed: engine down after {took_s:.2f} s")
            await until_ready(first)
            assert first.restarts == 1 and not set(pids_of(first)) & set(pids) and len(pids_of(first)) == 2
            assert await collect(replicas, 0, 400) == undisturbed[0]
            everyone = [pid for each in replicas.replicas for pid in pids_of(each)]
        assert not any(map(alive, everyone))

    asyncio.run(main())
    assert ("ended with exit code 4" if victim == "follower" else "killed by signal 9") in caplog.text


async def until_ready(replica: Replica) -> None:
    async with asyncio.timeout(LONG_S):
        while replica.state != "ready":
            await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_55_an_update_by_path_survives_the_loss_of_a_rank(folder, tmp_path):
    new = tiny_model(tmp_path / "new", seed=1)

    async def main() -> None:
        async with asyncio.timeout(240), started(folder, CONFIG) as replicas:
            (engine,) = replicas.replicas
            old = await collect(replicas, 0, 20)
            await replicas.call_all(Pause("abort"))
            states = await replicas.call_all(UpdateWeights(FileSource(str(new))))
            assert isinstance(states[0], EngineState) and states[0].version == 1
            await replicas.call_all(Resume())
            fresh = await collect(replicas, 0, 20)
            assert fresh != old
            os.kill(pids_of(engine)[1], signal.SIGKILL)
            await until(engine, "down")
            await until_ready(engine)
            assert await collect(replicas, 0, 20) == fresh

    asyncio.run(main())


@pytest.mark.slow
def test_a_rank_that_hangs_ends_its_engine_at_the_deadline(folder, monkeypatch):
    monkeypatch.setattr(parallelism, "STEP_S", 3.0)
    with LLM(folder, dtype="float32", device="cpu", max_running=4, tensor_parallel=2) as llm:
        tokens_of(llm)
        (pid,) = ranks_of(os.getpid())
        os.kill(pid, signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(EngineDead, match="another rank of this engine is gone or does not respond"):
            tokens_of(llm)
        assert time.monotonic() - began_s > 2.5
    assert not alive(pid)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_server_leaves_no_rank_processes(folder, monkeypatch):
    monkeypatch.setattr(serving, "START_S", 200.0)
    flags = ("--tensor-parallel", 2, "--max-running", 4)
    with serving.serving(folder, *flags) as server, server.client() as client:
        assert client.get("/server_info").json()["tp_size"] == 2
        asked = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
        answer = client.post("/v1/completions", json=asked).raise_for_status().json()
        assert len(answer["choices"][0]["completion_token_ids"]) == 5
        refused = client.post("/v1/completions", json={"prompt": [1] * 99, "export_kv": True})
        assert refused.status_code == 400 and "does not export KV" in refused.text
        unchecked = client.post("/weights_checker", json={"action": "checksum"})
        assert unchecked.status_code == 400 and "several ranks" in unchecked.text
        (engine,) = server.engine_pids().values()
        pids = [engine, *ranks_of(engine)]
        assert len(pids) == 2 and all(map(alive, pids))
        server.process.kill()
        wait_until(lambda: not any(map(alive, pids)), LONG_S)
