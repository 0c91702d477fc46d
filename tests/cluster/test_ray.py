"""A fleet on a real Ray cluster of several nodes: placement, killed nodes under load, scaling and shutdown.

Run by `make test-ray`, in an environment that has Ray.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate.layers.cpu.build import load_kernels
from headgate.testing.tiny import tiny_model
from tests.api.serving import Served, clean_environment, command, metric_values, up, wait_until
from tests.api.test_cli import the_sentence
from tests.cluster.machines import LOOPBACK, Machines, below, gone, machines, parent, servers_in
from tests.router.test_kill import Asking, differences, requests

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(580),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray's own log files and processes
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SERVERS, NODES, CPUS = 4, 3, 4
HEALED_S = 180.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    load_kernels()  # compile them here in a fresh environment, not within the servers' start-up timeout
    return tiny_model(tmp_path_factory.mktemp("ray") / "tiny", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Machines]:
    with machines(NODES, CPUS) as made:
        yield made


@pytest.fixture(scope="module")
def running(cluster: Machines, model: Path) -> Iterator[Served]:
    flags = ("--ray", cluster.address, "--mixed", SERVERS, "--kv-blocks", 1024)
    with up(model, *flags, "--drain-timeout", 10, HEADGATE_ADMIN_KEY="root") as fleet:
        yield fleet


@pytest.fixture
def fleet(running: Served, cluster: Machines) -> Served:
    """Restore the initial number of servers and nodes of the fleet."""
    cluster.add(NODES - len(cluster.nodes))
    with running.client("root", follow_redirects=False) as http:
        answer = http.post("/v1/scale", json={"mixed": SERVERS, "timeout": HEALED_S}, timeout=HEALED_S + 30)
        assert answer.status_code == 200, answer.text
    wait_for(running, SERVERS)
    return running


def workers(fleet: Served) -> list[dict[str, Any]]:
    with fleet.client("root") as http:
        return http.get("/v1/workers").json()["workers"]


def wait_for(fleet: Served, ready: int) -> None:
    wait_until(lambda: [each["state"] for each in workers(fleet)] == ["ready"] * ready, HEALED_S)


def by_node(cluster: Machines, fleet: Served) -> list[set[int]]:
    """Return the processes of the servers, node by node."""
    pids = {each["pid"] for each in workers(fleet)}
    return [cluster.running(node) & pids for node in cluster.nodes]


def ask_while(fleet: Served, salt: str, action: Callable[[], Awaitable[None]]) -> None:
    """Check that 32 seeded streams equal an undisturbed run, although `action` runs in the middle of them."""
    asked = requests(32, 400)

    async def main() -> None:
        wanted = await Asking(fleet.url, asked, f"alone-{salt}").all()
        asking = Asking(fleet.url, asked, salt)
        async with asyncio.timeout(240):
            answering = asyncio.create_task(asking.all())
            while sum(count > 3 for count in asking.events) < 12:
                assert not answering.done() or answering.result()
                await asyncio.sleep(0.01)
            await action()
            assert differences(await answering, wanted) == []

    asyncio.run(main())


def resumes(fleet: Served) -> float:
    page = httpx.get(f"{fleet.url}/metrics", timeout=10, trust_env=False).text
    return next(
        float(line.split()[1]) for line in page.splitlines() if line.startswith("headgate:router_resumes_total")
    )


def test_servers_are_spread_over_the_nodes_and_accept_requests_from_the_router_only(fleet: Served, cluster: Machines):
    # Each node has room for all of them.
    assert sorted(map(len, by_node(cluster, fleet))) == [1, 1, 2]
    worker = workers(fleet)[0]
    assert LOOPBACK in worker["url"]
    body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}
    assert httpx.post(f"{worker['url']}/v1/completions", json=body, trust_env=False).status_code == 401
    assert httpx.post(f"{worker['url']}/v1/pause", json={}, trust_env=False).status_code in (401, 403)
    with fleet.client() as http:
        assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
        assert http.post("/v1/scale", json={"mixed": 1}).status_code == 403


def test_36_all_32_streams_survive_a_killed_node_and_the_fleet_recovers(fleet: Served, cluster: Machines):
    before, moved = {each["url"] for each in workers(fleet)}, resumes(fleet)
    full = max(cluster.nodes, key=lambda node: len(servers_in(cluster.running(node))))
    killed: set[int] = set()

    async def kill_node() -> None:
        killed.update(await asyncio.to_thread(cluster.kill, full))

    ask_while(fleet, "killed", kill_node)
    assert resumes(fleet) > moved
    wait_for(fleet, SERVERS)
    after = {each["url"] for each in workers(fleet)}
    assert len(after - before) == 2  # the servers of that node were restarted on other nodes
    assert sum(map(len, by_node(cluster, fleet))) == SERVERS
    gone(killed)


def test_a_server_dies_with_its_actor_and_is_restarted(fleet: Served, cluster: Machines):
    victim = workers(fleet)[0]["pid"]
    everything = {victim, *below(victim)}
    actor = parent(victim)
    assert actor in set().union(*map(cluster.running, cluster.nodes))
    os.kill(actor, signal.SIGKILL)
    gone(everything)
    wait_until(lambda: victim not in {each["pid"] for each in workers(fleet)}, HEALED_S)
    wait_for(fleet, SERVERS)


def test_44_scaling_up_and_down_breaks_none_of_32_streams(fleet: Served, cluster: Machines):
    async def scale(number: int) -> None:
        flags = (f"mixed={number}", "--url", fleet.url, "--timeout", HEALED_S)
        environment = clean_environment(HEADGATE_ADMIN_KEY="root")
        process = await asyncio.create_subprocess_exec(
            *command("scale", *flags), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, error = await asyncio.wait_for(process.communicate(), HEALED_S + 30)
        assert process.returncode == 0 and f"{number} ready of {number}" in out.decode(), out + error

    ask_while(fleet, "grown", lambda: scale(6))
    wait_for(fleet, 6)
    assert Counter(len(place) for place in by_node(cluster, fleet)) == {2: 3}
    ours = servers_in(set().union(*map(cluster.running, cluster.nodes)))
    ask_while(fleet, "shrunk", lambda: scale(2))
    wait_for(fleet, 2)
    left = {pid for each in workers(fleet) for pid in (each["pid"], *below(each["pid"]))}
    gone({pid for pid in ours if pid not in left and b"serve" in cmdline(pid)})


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_servers_that_find_no_resources_in_time_are_named(cluster: Machines, model: Path):
    flags = ("--ray", cluster.address, "--mixed", 1, "--cpus", 99, "--room-timeout", 3, "--port", 0)
    done = run("up", model, *flags)
    assert done.returncode == 1, done.stderr
    assert (
        "after 3 s the Ray cluster lacks resources for worker 0 (mixed: 99 CPU); free on all nodes together:"
        in the_sentence(done)
    )


@pytest.mark.usefixtures("fleet")
def test_scaling_beyond_the_cluster_fails_with_the_pending_servers_and_the_others_keep_serving(
    cluster: Machines, model: Path
):
    flags = ("--ray", cluster.address, "--mixed", 1, "--cpus", 3, "--room-timeout", 10, "--kv-blocks", 64)
    with up(model, *flags, HEADGATE_ADMIN_KEY="root") as large, large.client("root") as http:
        answer = http.post("/v1/scale", json={"mixed": 4, "timeout": 200}, timeout=230)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "scale_failed")
        assert "after 10 s the Ray cluster lacks resources for worker" in answer.json()["error"]["message"]
        # Servers that found room stay; the others are no longer wanted.
        size = wait_until(lambda: settled(http), HEALED_S)
        assert 1 <= size["wanted"]["mixed"] <= NODES
        body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3


def settled(http: httpx.Client) -> dict[str, Any] | None:
    size = http.get("/v1/scale").json()["result"]
    return size if size["wanted"] == size["ready"] else None


@pytest.mark.usefixtures("fleet")
def test_prefill_and_decode_servers_transfer_kv_between_nodes(cluster: Machines, model: Path):
    prompt = random.Random(0).choices(range(256), k=300)
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    flags = ("--ray", cluster.address, "--prefill", 1, "--decode", 1, "--kv-blocks", 64, "--max-context", 512)
    with up(model, *flags, HEADGATE_ADMIN_KEY="root") as pair, pair.client("root") as http:
        answer = http.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 8
        (decoder,) = [each for each in workers(pair) if each["role"] == "decode"]
        page = metric_values(httpx.get(f"{decoder['url']}/metrics", timeout=10, trust_env=False).text)
        assert page['headgate:kv_transfers_total{engine="0"}'] == 1


@pytest.mark.parametrize(
    ("address", "about"),
    [("127.0.0.2:9", "no Ray cluster answers at 127.0.0.2:9"), ("ray://x:1", "HOST:PORT"), ("nonsense", "HOST:PORT")],
)
def test_a_wrong_ray_address_is_reported_in_one_sentence(model: Path, address: str, about: str):
    done = run("up", model, "--ray", address, "--port", 0)
    assert done.returncode in (1, 2) and about in the_sentence(done)


@pytest.mark.usefixtures("fleet")
def test_a_model_missing_on_the_nodes_is_reported_in_one_sentence(cluster: Machines, tmp_path: Path):
    done = run("up", tmp_path / "nowhere", "--ray", cluster.address, "--mixed", 1, "--port", 0)
    assert done.returncode == 1 and "nowhere is neither a folder" in the_sentence(done)


@pytest.mark.usefixtures("fleet")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_after_sigterm_or_sigkill(cluster: Machines, model: Path, number: int):
    before = servers_in(set().union(*map(cluster.running, cluster.nodes)))
    with up(model, "--ray", cluster.address, "--mixed", 1, "--cpus", 0.5, "--kv-blocks", 64) as other:
        ours = servers_in(set().union(*map(cluster.running, cluster.nodes))) - before
        assert len(ours) >= 2  # a server, and its engine
        code = other.stop(number, timeout_s=90)
    assert code == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    gone({pid for pid in ours if b"headgate" in cmdline(pid)})
    assert not any("Traceback" in message for message in other.messages())


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=200, env=clean_environment())
