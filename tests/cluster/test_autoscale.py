"""Autoscaling decisions, with simulated loads and a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from headgate.cluster.autoscale import Autoscaler, AutoscaleState, ScaleBounds, Snapshot, Thresholds, decide
from headgate.errors import RequestError

THRESHOLDS = Thresholds()
WIDE = ScaleBounds(1, 8)


@dataclass
class Simulated:
    """Servers with a capacity of one unit of load each; the excess queues up."""

    load: Callable[[float], float]
    servers: int = 1
    bounds: ScaleBounds = WIDE
    start_s: float = 20.0  # time until a new server is ready
    seed: int = 0
    noise: float = 0.0
    now_s: float = 0.0
    backlog: float = 0.0
    history: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._ready_s = [-1.0] * self.servers
        self._memory: AutoscaleState | None = None

    def snapshot(self) -> Snapshot:
        ready = sum(at_s <= self.now_s for at_s in self._ready_s)
        demand = max(0.0, self.load(self.now_s) * (1 + self._random.gauss(0, self.noise)))
        self.backlog = max(0.0, self.backlog + demand - ready)
        used = min(1.0, demand / max(1, ready))
        return Snapshot(self.now_s, self.servers, ready, self.backlog / max(1, ready), 0.8 * used, 0.6 * used)

    def run(self, seconds: int) -> Simulated:
        for _ in range(seconds):
            self.now_s += 1
            seen = self.snapshot()
            self._memory = self._memory or AutoscaleState.new(seen, THRESHOLDS)
            wanted, self._memory = decide(seen, self._memory, self.bounds, THRESHOLDS)
            self._ready_s = self._ready_s[:wanted] + [self.now_s + self.start_s] * (wanted - self.servers)
            self.servers = wanted
            self.history.append(wanted)
        return self

    @property
    def changes(self) -> int:
        return sum(a != b for a, b in pairwise(self.history))


def seen(
    now_s: float, *, wanted: int = 2, ready: int | None = None, queue_s: float = 0.0, kv: float = 0.0
) -> Snapshot:
    return Snapshot(now_s, wanted, wanted if ready is None else ready, queue_s, kv, 0.0)


def test_autoscaling_grows_when_requests_wait_longer_and_longer():
    fleet = Simulated(lambda now_s: min(5.0, now_s / 60), bounds=ScaleBounds(1, 8)).run(1200)
    assert 5 <= fleet.servers <= 8 and fleet.backlog == 0


def test_autoscaling_grows_when_kv_is_nearly_full_even_if_nothing_waits():
    memory = AutoscaleState.new(seen(0), THRESHOLDS)
    for now_s in range(60):
        wanted, memory = decide(seen(now_s, kv=0.95), memory, WIDE, THRESHOLDS)
        if wanted != 2:
            break
    assert wanted == 3 and now_s >= THRESHOLDS.rest_s


@pytest.mark.parametrize("load", [0.3, 0.9, 1.7, 2.4, 3.6])
@pytest.mark.parametrize("seed", range(2))
def test_noise_around_a_constant_load_does_not_cause_flapping(load: float, seed: int):
    fleet = Simulated(lambda _: load, noise=0.25, seed=seed).run(1800)
    settled = Simulated(lambda _: load, servers=fleet.servers, noise=0.25, seed=seed + 100).run(3600)
    assert fleet.changes <= 6 and settled.changes <= 3, (fleet.history[-1], settled.changes)


def test_a_short_spike_changes_nothing():
    memory = AutoscaleState.new(seen(0), THRESHOLDS)
    for now_s in range(1, 300):
        queue_s = 30.0 if now_s % 10 < 4 else 0.0  # never for five consecutive seconds
        wanted, memory = decide(seen(now_s, queue_s=queue_s, kv=0.6), memory, WIDE, THRESHOLDS)
        assert wanted == 2


def test_autoscaling_shrinks_one_server_at_a_time_and_never_below_the_minimum():
    fleet = Simulated(lambda _: 0.0, servers=6, bounds=ScaleBounds(2, 8)).run(3600)
    steps = [a - b for a, b in pairwise(fleet.history) if a != b]
    assert steps == [1, 1, 1, 1] and fleet.servers == 2
    assert fleet.history[int(THRESHOLDS.shrink_after_s) - 2] == 6  # low load for minutes before the first is removed


def test_autoscaling_never_exceeds_the_maximum():
    assert Simulated(lambda _: 100.0, bounds=ScaleBounds(1, 3)).run(600).servers == 3


def test_narrowed_bounds_take_effect_at_once():
    for wanted, kept in ((9, 4), (1, 2)):
        memory = AutoscaleState.new(seen(0, wanted=wanted), THRESHOLDS)
        assert decide(seen(1, wanted=wanted), memory, ScaleBounds(2, 4), THRESHOLDS)[0] == kept


def test_autoscaling_waits_for_starting_servers_before_it_requests_more():
    memory = AutoscaleState.new(seen(0), THRESHOLDS)
    asked = []
    for now_s in range(1, 250):
        wanted, memory = decide(seen(now_s, ready=1, queue_s=50.0), memory, WIDE, THRESHOLDS)
        asked.append(wanted)
    assert set(asked) == {2}
    # A server that never becomes ready must not block scaling forever.
    assert decide(seen(400, ready=1, queue_s=50.0), memory, WIDE, THRESHOLDS)[0] > 2


def test_no_server_is_removed_while_requests_wait_even_if_nothing_is_full():
    memory = AutoscaleState.new(seen(0), THRESHOLDS)
    for now_s in range(1, 1000):
        wanted, memory = decide(seen(now_s, queue_s=1.0), memory, WIDE, THRESHOLDS)
        assert wanted == 2


@pytest.mark.parametrize(("servers", "kv", "left"), [(2, 0.4, 2), (4, 0.3, 3), (4, 0.45, 4)])
def test_a_server_is_removed_only_if_the_others_would_still_be_half_empty(servers: int, kv: float, left: int):
    memory = AutoscaleState.new(seen(0, wanted=servers), THRESHOLDS)
    for now_s in range(1, 140):
        wanted, memory = decide(seen(now_s, wanted=servers, kv=kv), memory, WIDE, THRESHOLDS)
        servers = wanted
    assert servers == left


def test_no_server_is_removed_while_another_is_not_ready():
    memory = AutoscaleState.new(seen(0, wanted=3), THRESHOLDS)
    for now_s in range(1, 1000):
        wanted, memory = decide(seen(now_s, wanted=3, ready=2), memory, WIDE, THRESHOLDS)
        assert wanted == 3


def test_a_regretted_shrink_doubles_the_wait_before_the_next():
    # Two servers have no load at all; one is overloaded.
    fleet = Simulated(lambda _: 0.0, servers=2)
    fleet.snapshot = lambda: seen(  # type: ignore[method-assign]
        fleet.now_s, wanted=fleet.servers, queue_s=0.0 if fleet.servers > 1 else 20.0
    )
    fleet.run(7200)
    shrinks = [i for i, (a, b) in enumerate(pairwise(fleet.history)) if b < a]
    gaps = [b - a for a, b in pairwise(shrinks)]
    assert len(shrinks) >= 3 and all(later > 1.5 * earlier for earlier, later in pairwise(gaps))


def test_a_manual_change_is_left_alone_for_a_while():
    memory = AutoscaleState.new(seen(0), THRESHOLDS)
    for now_s in range(1, 119):
        _, memory = decide(seen(now_s), memory, WIDE, THRESHOLDS)
    wanted, memory = decide(seen(119, wanted=5), memory, WIDE, THRESHOLDS)
    assert wanted == 5 and memory.changed_s == 119
    assert decide(seen(125, wanted=5), memory, WIDE, THRESHOLDS)[0] == 5


@pytest.mark.parametrize("text", ["6", "0:3", "4:2", "a:b", "1:", "-1:2", "1:2:3", ""])
def test_invalid_bounds_are_refused(text: str):
    with pytest.raises(RequestError, match="LEAST:MOST"):
        ScaleBounds.of(text, "--autoscale mixed")


def test_the_loop_applies_decisions_and_forgets_load_from_before_a_pause():
    now_s, asked, queue_s, paused = [0.0], [], [9.0], [False]

    def look(role: str, at_s: float) -> Snapshot | None:
        return None if paused[0] else seen(at_s, wanted=1 + sum(n["mixed"] - 1 for n in asked), queue_s=queue_s[0])

    scaler = Autoscaler({"mixed": ScaleBounds(1, 2)}, look, asked.append, clock=lambda: now_s[0])

    def turns(number: int) -> None:
        for _ in range(number):
            now_s[0] += 1
            scaler.turn()

    turns(10)
    paused[0] = True
    turns(1)
    paused[0] = False
    turns(10)
    assert asked == []  # overloaded for twenty seconds, but not consecutively
    turns(10)
    assert asked == [{"mixed": 2}]
