"""Servers on the machines of a Ray cluster, each with a place reserved for it.

Ray says where there is room and tells us when a machine dies; everything else is as on one machine. On its node an actor,
the keeper, starts the server as a child of its own: a server ends with its keeper, a keeper with its node or with us. Nodes
need the same packages as we have, and the model where it was said to be. No weight and no request passes through Ray.

Ray's calls wait for its head. They are made in threads, so that a head that does not answer holds up nobody's requests.
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
from headgate.cluster.local import LAST_WORDS_S, LocalLauncher
from headgate.errors import HeadgateError, RequestError

log = logging.getLogger(__name__)

REACH_S = 5.0  # for the head to take a connection
JOIN_S = 60.0  # for it to answer
LOOK_EVERY_S = 0.25
COMPLAIN_EVERY_S = 60.0


class RayMissing(RequestError):
    pass


class NoCluster(HeadgateError):
    """There is no Ray cluster at that address, or none that takes us."""


class NoRoom(HeadgateError):
    """The cluster has no place for what was asked, and did not get one in time."""


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
    """Use as `async with`, around the fleet."""

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
        self._waiting: dict[ServerProcess, Recipe] = {}  # for room
        self._nodes: Counter[str] = Counter()  # servers of ours, by node

    async def __aenter__(self) -> RayLauncher:
        if self._address != "auto":
            await asyncio.to_thread(_reach, self._address)
        await self._join()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self._ray.shutdown)

    async def _join(self) -> None:
        """Connect; in a thread that dies with us, since Ray goes on trying for minutes."""
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
            raise NoCluster(f"what listens at {self._address} does not answer as a Ray cluster does") from None
        except Exception as error:
            raise NoCluster(f"the Ray cluster at {self._address} does not take us: {_one_line(error)}") from None

    # -- one server ---------------------------------------------------------------------

    async def live(self, server: ServerProcess, on_ready: Callable[[], None]) -> None:
        recipe = self._recipes[server.role]
        try:
            async with self._room(server, recipe) as group:
                await self._kept(server, recipe, group, on_ready)
        except self._ray.exceptions.RayError as error:
            server.sentence = server.sentence or f"Ray: {_one_line(error)}"

    @asynccontextmanager
    async def _room(self, server: ServerProcess, recipe: Recipe) -> AsyncIterator[Any]:
        """A place for it on some node, for as long as this lasts."""
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
        # Soft: where that node has no room, any other will do.
        reserve = self._ray.util.placement_group
        return reserve([_bundle(recipe)], strategy="STRICT_PACK", _soft_target_node_id=node or None)

    def _put(self, server: ServerProcess, node: str) -> None:
        """Count it there from now on, so that the next one goes elsewhere."""
        self._nodes[server.node] -= 1
        self._nodes[node] += 1
        server.node = node

    def _emptiest(self, recipe: Recipe, nodes: Sequence[Mapping[str, Any]]) -> str:
        """The node with the fewest servers of ours, so that one that dies takes few with it."""
        needs = _bundle(recipe).items()
        fit = [
            str(node["NodeID"])
            for node in nodes
            if node["Alive"] and all(node["Resources"].get(name, 0) >= share for name, share in needs)
        ]
        return min(fit, key=lambda node: (self._nodes[node], node), default="")

    async def _granted(self, server: ServerProcess, group: Any) -> str:
        """The node it got; raises NoRoom if a server that is new to the fleet gets none in time."""
        began_s = complained_s = time.monotonic()
        while True:
            told = await asyncio.to_thread(self._ray.util.placement_group_table, group)
            if told.get("state") == "CREATED":
                return str(next(iter(told["bundles_to_node_id"].values())))
            now_s = time.monotonic()
            if not server.proven and now_s - began_s > self._room_timeout_s:
                raise NoRoom(f"after {self._room_timeout_s:g} s {await self._pending()}")
            if now_s - complained_s > COMPLAIN_EVERY_S:
                complained_s = now_s
                log.warning("%s; waiting on", await self._pending())
            await asyncio.sleep(LOOK_EVERY_S)

    async def _pending(self) -> str:
        """Who waits for room, and what there is."""
        waiting = sorted(self._waiting.items(), key=lambda each: each[0].index)
        needs = ", ".join(f"worker {each.index} ({each.role}: {_told(_bundle(recipe))})" for each, recipe in waiting)
        free = await asyncio.to_thread(self._ray.available_resources)
        shown = {name: free.get(name, 0.0) for name in ("CPU", "GPU")}
        return f"the Ray cluster has no room for {needs}; free are {_told(shown)}, all nodes together"

    async def _kept(self, server: ServerProcess, recipe: Recipe, group: Any, on_ready: Callable[[], None]) -> None:
        keeper = await asyncio.to_thread(self._keeper, recipe, group)
        try:
            server.url, server.pid, server.sentence = await keeper.start.remote()
            if server.url:
                on_ready()
                server.sentence = await keeper.ended.remote()
        finally:
            await self._dismiss(keeper)

    def _keeper(self, recipe: Recipe, group: Any) -> Any:
        place = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
        remote = self._ray.remote(Keeper).options(
            num_cpus=recipe.cpus, num_gpus=recipe.gpus, scheduling_strategy=place, max_restarts=0
        )
        addresses = sorted({node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]})
        threads = {"OMP_NUM_THREADS": str(max(1, int(recipe.cpus)))}
        known = addresses if recipe.exchanges_kv else []
        return remote.remote(recipe.arguments, threads | dict(recipe.environ), known, self._drain_timeout_s)

    async def _dismiss(self, keeper: Any) -> None:
        """Let the server end in its time; then nothing of it is left, and the keeper may go."""
        try:
            async with asyncio.timeout(self._drain_timeout_s + 2 * LAST_WORDS_S):
                await keeper.stop.remote()
        except (TimeoutError, self._ray.exceptions.RayError):
            pass  # it has died, or its node does not answer: the server ends with it
        finally:
            await asyncio.to_thread(self._ray.kill, keeper)


class Keeper:
    """The actor. It holds the other end of its server's standard input: when it dies, so does the server."""

    def __init__(
        self, arguments: Sequence[str], environ: Mapping[str, str], peers: Sequence[str], drain_timeout_s: float
    ) -> None:
        host = import_ray().util.get_node_ip_address()
        listen = f"[{host}]:0" if ":" in host else f"{host}:0"
        exchange = ("--kv-listen", listen, "--kv-peers", ",".join(peers)) if peers else ()
        # What was asked comes last, and wins.
        recipe = Recipe(("--host", host, *exchange, *arguments), os.environ | dict(environ))
        logging.basicConfig(level=logging.INFO)  # what the server says goes to Ray's logs of this node
        self._launcher = LocalLauncher({"": recipe}, drain_timeout_s=drain_timeout_s)
        self._server = ServerProcess(os.getpid(), "")
        self._life: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, int | None, str]:
        """When it is ready: its address and process; when it has ended before: why."""
        ready = asyncio.Event()
        self._life = asyncio.create_task(self._launcher.live(self._server, ready.set))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({self._life, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        server = self._server
        return (server.url if ready.is_set() else ""), server.pid, server.sentence

    async def ended(self) -> str:
        """Returns when it has."""
        assert self._life is not None
        await asyncio.wait({self._life})
        return self._server.sentence

    async def stop(self) -> None:
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait({self._life})


# ------------------------------------------------------------------------------------------------------------- addresses


def checked_address(address: str) -> str:
    if address == "auto":
        return address
    host, _, port = address.rpartition(":")
    if not host or "/" in address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise RequestError(f"--ray takes auto or the HOST:PORT of the cluster's head, not {address!r}")
    return address


def _reach(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except OSError as error:
        raise NoCluster(f"no Ray cluster answers at {address}: {error.strerror or error}") from None


# ----------------------------------------------------------------------------------------------------------------- words


def _bundle(recipe: Recipe) -> dict[str, float]:
    shares = {"CPU": recipe.cpus, "GPU": recipe.gpus}
    return {name: share for name, share in shares.items() if share}


def _told(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{share:g} {name}" for name, share in resources.items())


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
