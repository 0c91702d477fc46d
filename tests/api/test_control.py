"""Control calls that wait and that are refused, with engines that answer when the test allows it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET

from headgate.api.accounting.ledger import PREFILL, Ledger
from headgate.api.accounting.metrics import ServerMetrics
from headgate.api.control.lifecycle import Controls, Refusal
from headgate.api.host import ServerContext
from headgate.api.weight_labels import MOST_LABELS, WeightLabels
from headgate.contract.control import overall
from headgate.contract.orders import UNORDERED, Order
from headgate.engine.moving_stream import Place
from headgate.engine.replicas import Replica
from headgate.errors import EngineDead, Late, Unavailable
from headgate.protocol.command import Command, Denied, EngineState, FileSource, Flush, Pause, Resume
from tests.simulated import run


class Engines:
    """Two fake engines. Once `free` is set, each command is answered with the next entry of `answers`."""

    def __init__(self, *answers: dict[int, Any]) -> None:
        self.commands: list[Command] = []
        self.free = asyncio.Event()
        self.answers = list(answers)
        self.asked = None
        self.version = 2

    async def call_all(self, command: Command, timeout_s: float = 1) -> dict[int, Any]:
        self.commands.append(command)
        await self.free.wait()
        return self.answers.pop(0)


def controls(engines: Engines) -> tuple[Controls, Ledger]:
    ledger = Ledger(ServerMetrics(), limit=10)
    api: Any = SimpleNamespace(engines=engines, ledger=ledger, labels=WeightLabels())
    return Controls(api, ServerContext("0", "m", [Replica(i, "") for i in range(2)], ledger)), ledger


PAUSED = EngineState("paused", "abort", True, 3)


def test_24_25_during_a_weight_update_other_changes_are_refused_before_they_reach_an_engine():
    async def main() -> None:
        engines = Engines({0: PAUSED, 1: PAUSED})
        control, _ = controls(engines)
        updating = asyncio.create_task(control.update(FileSource("x")))
        await asyncio.sleep(0)
        for verb in (
            control.resume(),
            control.pause(Pause()),
            control.sleep(["weights"]),
            control.update(FileSource("y")),
        ):
            with pytest.raises(Refusal, match="being updated") as refused:
                await verb
            assert refused.value.status == 409
        assert len(engines.commands) == 1
        engines.free.set()
        assert (await updating).weight_version == 3

    run(main())


def test_22_a_pause_is_answered_after_the_clients_of_ended_requests_have_the_end():
    async def main() -> None:
        engines = Engines({0: EngineState("paused", "abort", True, 0, {7: 5})})
        engines.free.set()
        control, ledger = controls(engines)
        async with ledger.admit(label="slow", kind="completion") as record:
            record.begin(0, SimpleNamespace(place=Place(0, 7), settled=True, made=0))  # type: ignore[arg-type]
            pausing = asyncio.create_task(control.pause(Pause()))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not pausing.done()
            record.finish(0, "abort", "pause", 1, 0, 5)
        assert (await pausing).aborted == 1

    run(main())


@pytest.mark.parametrize("order", [UNORDERED, Order("router", 1)], ids=["an operator", "a router"])
def test_72_a_pause_counts_a_request_with_several_choices_once_and_names_it_to_routers(order: Order):
    async def main() -> None:
        engines = Engines({0: EngineState("paused", "abort", True, 0, {7: 5, 8: 5, 9: 0})})
        engines.free.set()
        control, ledger = controls(engines)
        async with (
            ledger.admit(label="a", kind="completion", choices=2) as a,
            ledger.admit(label="b", kind=PREFILL) as b,
        ):
            for record, choice, id in ((a, 0, 7), (a, 1, 8), (b, 0, 9)):
                record.begin(choice, SimpleNamespace(place=Place(0, id), settled=True, made=0))  # type: ignore[arg-type]
                record.finish(choice, "abort", "pause", 1, 0, 5)
                record.streams[choice] = SimpleNamespace(place=Place(0, id))  # type: ignore[assignment]
            pausing = asyncio.create_task(control.pause(Pause(), order))
            for _ in range(20):
                await asyncio.sleep(0)
        result = await pausing
        assert result.aborted == 1
        assert result.aborted_requests == ([("", "a")] if order.router else UNSET)

    run(main())


def test_an_engine_that_is_down_is_listed_and_a_refusal_by_an_engine_fails_the_call():
    async def main() -> None:
        dead, denied = EngineDead("engine 1 is down"), Denied(409, "conflict", "no")
        engines = Engines({0: PAUSED, 1: dead}, {0: PAUSED, 1: denied}, {0: dead, 1: dead})
        engines.free.set()
        control, _ = controls(engines)
        result = await control.pause(Pause())
        assert [engine.state for engine in result.engines] == ["paused", "down"] and result.is_paused
        with pytest.raises(Refusal, match=r"engine 1: no \(1 of 2 engines have followed\)"):
            await control.resume()
        with pytest.raises(Unavailable, match="engine 1 is down"):
            await control.flush()
        assert engines.commands[1:] == [Resume(), Flush()]

    run(main())


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        ({"running"}, "running"),
        ({"paused"}, "paused"),
        ({"paused", "running"}, "pausing"),
        ({"paused", "updating"}, "updating"),
        ({"quarantined", "updating", "pausing"}, "quarantined"),
        ({"draining", "running"}, "running"),
        (set(), "running"),
    ],
)
def test_the_state_of_several_engines_is_the_most_significant_one(seen: set[str], state: str):
    assert overall(seen) == state


def test_78_the_label_of_an_update_is_kept_if_it_may_have_happened_and_forgotten_if_it_was_refused():
    async def main() -> None:
        denied = Denied(400, "bad_weights", "no")
        engines = Engines({0: denied, 1: denied}, {0: Late("late"), 1: Late("late")}, {0: PAUSED, 1: PAUSED})
        engines.free.set()
        control, _ = controls(engines)
        with pytest.raises(Refusal):
            await control.update(FileSource("x"), label="refused")
        assert control._labels.given(3) is None
        await control.update(FileSource("x"), label="late")
        assert control._labels[3] == "late", "the engines may still carry it out"
        assert (await control.update(FileSource("x"), label="1")).weight_label == "1"
        control.relabel("other")
        assert control._labels[engines.version] == "other"

    run(main())


def test_78_the_number_of_labels_is_bounded():
    labels = WeightLabels()
    for version in range(MOST_LABELS + 5):
        labels.set(version, "same")
    assert (labels[0], labels[5]) == ("0", "same")
    labels.set(5, None)
    assert labels[5] == "5"
