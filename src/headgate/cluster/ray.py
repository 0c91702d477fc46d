"""Runs servers on the machines of a Ray cluster, each in a placement group of its own.

Ray finds nodes with free resources and reports dead nodes; everything else is as on one machine. On each node, an
actor starts the server as a child process. The server exits with its actor, and the actor exits with its node or with
this process. Nodes need the same packages as this machine, and the model at the given path. Weights and requests do
not pass through Ray.

Ray's calls block until the cluster's head answers. They run in threads, so that a slow head delays no request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from types import ModuleType
from typing import Any

from headgate.cluster.fleet import Recipe, ServerProcess
from headgate.cluster.local import EXIT_MARGIN_S, LocalLauncher
from headgate.errors import HeadgateError, RequestError

log = logging.getLogger(__name__)

CONNECT_S = 5.0  # how long the head may take to accept a connection
JOIN_S = 60.0  # how long the head may take to answer
POLL_INTERVAL_S = 0.25
WARNING_INTERVAL_S = 60.0


class RayMissing(RequestError):
    pass


class NoCluster(HeadgateError):
    """There is no Ray cluster at that address, or it refuses the connection."""


class NoRoom(HeadgateError):
    """The cluster did not have the required resources within the timeout."""


def import_ray() -> ModuleType:
    try:
        import ray
        import ray.exceptions
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise RayMissing(f"--ray needs the package ray: pip install 'headgate[ray]' ({error})") from None
    return ray  # type: ignore[no-any-return]


class RayLauncher:
    """Runs servers on a Ray cluster. An async context manager, entered before the fleet and exited after it."""

    keeps_address = False

    def __init__(
        self,
        address: str,
        recipes: Mapping[str, Recipe],
        *,
        drain_timeout_s: float = 30.0,
        room_timeout_s: float = 60.0,
    ) -> None:
        self._ray = import_ray()
        self._address = checked_address(address)
        self._recipes = dict(recipes)
        self._drain_timeout_s = drain_timeout_s
        self._room_timeout_s = room_timeout_s
        self._waiting: dict[ServerProcess, Recipe] = {}  # servers that wait for resources
        self._nodes: Counter[str] = Counter()  # number of servers, by node

    async def __aenter__(self) -> RayLauncher:
        if self._address != "auto":
            await asyncio.to_thread(_check_connection, self._address)
        await self._join()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self._ray.shutdown)

    async def _join(self) -> None:
        """Connect to the cluster, in a daemon thread, because Ray keeps retrying for minutes."""
        joined: Future[None] = Future()
        logging.getLogger("ray").setLevel(logging.ERROR)

        def join() -> None:
            try:
                self._ray.init(self._address, log_to_driver=False, configure_logging=False)
                joined.set_result(None)
            except BaseException as error:
                joined.set_exception(error)

        threading.Thread(target=join, name="headgate-ray", daemon=True).start()
        try:
            async with asyncio.timeout(JOIN_S):
                await asyncio.wrap_future(joined)
        except TimeoutError:
            raise NoCluster(f"{self._address} does not answer as a Ray cluster") from None
        except Exception as error:
            raise NoCluster(
                f"the Ray cluster at {self._address} refuses the connection: {_one_line(error)}"
            ) from None

    # -- one server ---------------------------------------------------------------------

    async def run(self, server: ServerProcess, on_ready: Callable[[], None]) -> None:
        recipe = self._recipes[server.role]
        try:
            async with self._room(server, recipe) as group:
                await self._run_actor(server, recipe, group, on_ready)
        except self._ray.exceptions.RayError as error:
            server.error = server.error or f"Ray: {_one_line(error)}"

    @asynccontextmanager
    async def _room(self, server: ServerProcess, recipe: Recipe) -> AsyncIterator[Any]:
        """Reserve resources for the server: yield a placement group, which is removed when the context exits."""
        self._put(server, self._emptiest(recipe, await asyncio.to_thread(self._ray.nodes)))
        making = asyncio.ensure_future(asyncio.to_thread(self._reserve, recipe, server.node))
        self._waiting[server] = recipe
        try:
            self._put(server, await self._granted(server, await asyncio.shield(making)))
            del self._waiting[server]
            yield making.result()
        finally:
            self._put(server, "")
            self._waiting.pop(server, None)
            group = await making
            with suppress(self._ray.exceptions.RayError):
                await asyncio.to_thread(self._ray.util.remove_placement_group, group)

    def _reserve(self, recipe: Recipe, node: str) -> Any:
        # A soft constraint: if that node lacks resources, Ray takes another.
        reserve = self._ray.util.placement_group
        return reserve([_bundle(recipe)], strategy="STRICT_PACK", _soft_target_node_id=node or None)

    def _put(self, server: ServerProcess, node: str) -> None:
        """Count the server on this node, so that the next server prefers another node."""
        self._nodes[server.node] -= 1
        self._nodes[node] += 1
        server.node = node

    def _emptiest(self, recipe: Recipe, nodes: Sequence[Mapping[str, Any]]) -> str:
        """Return the node with the fewest servers of this fleet, so that the loss of a node affects few servers."""
        needs = _bundle(recipe).items()
        fit = [
            str(node["NodeID"])
            for node in nodes
            if node["Alive"] and all(node["Resources"].get(name, 0) >= share for name, share in needs)
        ]
        return min(fit, key=lambda node: (self._nodes[node], node), default="")

    async def _granted(self, server: ServerProcess, group: Any) -> str:
        """Wait until Ray has placed the group; return its node. NoRoom after the timeout if the server is new."""
        began_s = warned_s = time.monotonic()
        while True:
            table = await asyncio.to_thread(self._ray.util.placement_group_table, group)
            if table.get("state") == "CREATED":
                return str(next(iter(table["bundles_to_node_id"].values())))
            now_s = time.monotonic()
            if not server.ever_ready and now_s - began_s > self._room_timeout_s:
                raise NoRoom(f"after {self._room_timeout_s:g} s {await self._pending()}")
            if now_s - warned_s > WARNING_INTERVAL_S:
                warned_s = now_s
                log.warning("%s; still waiting", await self._pending())
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _pending(self) -> str:
        """Describe the resources that waiting servers need, and the free resources."""
        waiting = sorted(self._waiting.items(), key=lambda each: each[0].index)
        needs = ", ".join(
            f"worker {each.index} ({each.role}: {_listed(_bundle(recipe))})" for each, recipe in waiting
        )
        free = await asyncio.to_thread(self._ray.available_resources)
        shown = {name: free.get(name, 0.0) for name in ("CPU", "GPU")}
        return f"the Ray cluster lacks resources for {needs}; free on all nodes together: {_listed(shown)}"

    async def _run_actor(
        self, server: ServerProcess, recipe: Recipe, group: Any, on_ready: Callable[[], None]
    ) -> None:
        actor = await asyncio.to_thread(self._actor, recipe, group)
        try:
            server.url, server.pid, server.error = await actor.start.remote()
            if server.url:
                on_ready()
                server.error = await actor.ended.remote()
        finally:
            await self._stop(actor)

    def _actor(self, recipe: Recipe, group: Any) -> Any:
        place = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
        remote = self._ray.remote(ServerActor).options(
            num_cpus=recipe.cpus, num_gpus=recipe.gpus, scheduling_strategy=place, max_restarts=0
        )
        addresses = sorted({node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]})
        threads = {"OMP_NUM_THREADS": str(max(1, int(recipe.cpus)))}
        peers = addresses if recipe.exchanges_kv else []
        return remote.remote(recipe.arguments, threads | dict(recipe.environ), peers, self._drain_timeout_s)

    async def _stop(self, actor: Any) -> None:
        """Let the server drain and exit, then kill the actor."""
        try:
            async with asyncio.timeout(self._drain_timeout_s + 2 * EXIT_MARGIN_S):
                await actor.stop.remote()
        except (TimeoutError, self._ray.exceptions.RayError):
            pass  # the actor has died or its node does not answer; the server exits with the actor
        finally:
            await asyncio.to_thread(self._ray.kill, actor)


class ServerActor:
    """The Ray actor of one server. It holds the server's standard input open, so the server exits with the actor."""

    def __init__(
        self, arguments: Sequence[str], environ: Mapping[str, str], peers: Sequence[str], drain_timeout_s: float
    ) -> None:
        host = import_ray().util.get_node_ip_address()
        listen = f"[{host}]:0" if ":" in host else f"{host}:0"
        exchange = ("--kv-listen", listen, "--kv-peers", ",".join(peers)) if peers else ()
        # The given arguments come last, because the last flag wins.
        recipe = Recipe(("--host", host, *exchange, *arguments), os.environ | dict(environ))
        logging.basicConfig(level=logging.INFO)  # the server's logs go to Ray's logs of this node
        self._launcher = LocalLauncher({"": recipe}, drain_timeout_s=drain_timeout_s)
        self._server = ServerProcess(os.getpid(), "")
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, int | None, str]:
        """Start the server; returns its URL (empty if it exited before it was ready), process id and error."""
        ready = asyncio.Event()
        self._task = asyncio.create_task(self._launcher.run(self._server, ready.set))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        server = self._server
        return (server.url if ready.is_set() else ""), server.pid, server.error

    async def ended(self) -> str:
        """Wait until the server has exited; returns its error."""
        assert self._task is not None
        await asyncio.wait({self._task})
        return self._server.error

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


# ------------------------------------------------------------------------------------------------------------- addresses


def checked_address(address: str) -> str:
    if address == "auto":
        return address
    host, _, port = address.rpartition(":")
    if not host or "/" in address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise RequestError(f"--ray takes auto or the HOST:PORT of the cluster's head, not {address!r}")
    return address


def _check_connection(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise NoCluster(f"no Ray cluster answers at {address}: {error.strerror or error}") from None


# -------------------------------------------------------------------------------------------------------------- messages


def _bundle(recipe: Recipe) -> dict[str, float]:
    shares = {"CPU": recipe.cpus, "GPU": recipe.gpus}
    return {name: share for name, share in shares.items() if share}


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{share:g} {name}" for name, share in resources.items())


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
