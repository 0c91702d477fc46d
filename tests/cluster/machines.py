"""A Ray cluster of several nodes on this machine. Nothing listens beyond loopback."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.api.serving import wait_until
from tests.router.test_up import is_running

# Ray replaces 127.0.0.1 by the machine's external address, but not this address.
LOOPBACK = "127.0.0.2"
START_S = 240.0
NODE: dict[str, Any] = {"node_ip_address": LOOPBACK, "object_store_memory": 80 * 2**20, "include_dashboard": False}


class Machines:
    """A Ray cluster: a head without CPUs, and nodes that can be killed."""

    def __init__(self, cpus: int) -> None:
        from ray.cluster_utils import Cluster

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._cpus = cpus
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **NODE})
        self.nodes: list[Any] = []

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, number: int) -> None:
        self.nodes += [self._cluster.add_node(num_cpus=self._cpus, **NODE) for _ in range(number)]

    def raylet(self, node: Any) -> int:
        return int(node.all_processes["raylet"][0].process.pid)

    def running(self, node: Any) -> set[int]:
        """Return all processes on that node."""
        return below(self.raylet(node))

    def kill(self, node: Any) -> set[int]:
        """Kill all processes of a node at once, like a power failure."""
        victims = [self.raylet(node), *self.running(node)]
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)
        return set(victims)

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def machines(nodes: int, cpus: int) -> Iterator[Machines]:
    made = Machines(cpus)
    try:
        made.add(nodes)
        yield made
    finally:
        made.close()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def below(pid: int) -> set[int]:
    """Return all descendants of a process, whichever of its threads started them."""
    parents = {}
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(each.name)] = parent(int(each.name))
    found, last = set(), {pid}
    while last:
        last = {child for child, above in parents.items() if above in last}
        found |= last
    return found


def servers_in(pids: set[int]) -> set[int]:
    """The Headgate servers and engines among these processes."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            if b"headgate" in Path(f"/proc/{pid}/cmdline").read_bytes() and is_running(pid):
                found.add(pid)
    return found


def gone(pids: set[int], timeout_s: float = 60.0) -> None:
    wait_until(lambda: not any(map(is_running, pids)), timeout_s)
