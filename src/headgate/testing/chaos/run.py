"""One run, from the models that are written for it to what is left of it in the end."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headgate.errors import HeadgateError
from headgate.testing.chaos import leaks
from headgate.testing.chaos.actions import FaultInjector, FleetOperator
from headgate.testing.chaos.catalogue import CatalogueItem, catalogue
from headgate.testing.chaos.client import clock
from headgate.testing.chaos.fleet import LOAD_KEY, START_S, ChaosFleet, local_servers, metrics
from headgate.testing.chaos.hostile import HostileClients
from headgate.testing.chaos.judge import AnswerJudge
from headgate.testing.chaos.load import ClientLoad
from headgate.testing.chaos.plan import draw
from headgate.testing.chaos.reference import ReferenceAnswers, WeightsName
from headgate.testing.chaos.report import ChaosReport
from headgate.testing.chaos.settings import ChaosSettings
from headgate.testing.tiny import tiny_model

log = logging.getLogger(__name__)

LAST_ACTIONS_S = 240.0  # for what was begun to be mended
CALM_S = 240.0  # for clients to finish when nothing goes wrong any more
READY_S = 120.0  # for servers to come back
KV_BLOCKS = 384  # few enough that now and then somebody has to wait, or give way
SERVED = ("--device", "cpu", "--kv-blocks", str(KV_BLOCKS), "--drain-timeout", "5", "--kv-times", "10,5,10")
COUNTED = ("retries", "resumes", "prefills_lost")


class TracebackCollector(logging.Handler):
    """Tracebacks that a process of the fleet has logged: each one is a bug."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "Traceback (most recent call last)" in text:
            self.found.append(text)


@dataclass(frozen=True, slots=True)
class ChaosModels:
    folders: dict[WeightsName, Path]
    cut: Path  # what a disk that was full has left of one

    @classmethod
    def write(cls, folder: Path) -> ChaosModels:
        folders = {
            name: tiny_model(folder / name, seed=seed, max_position_embeddings=4096) for seed, name in enumerate("ab")
        }
        cut = folder / "cut"
        shutil.copytree(folders["b"], cut)
        weights = cut / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
        return cls(folders, cut)


@asynccontextmanager
async def reference_server(models: ChaosModels, environ: Mapping[str, str]) -> AsyncIterator[ReferenceAnswers]:
    arguments = [str(models.folders["a"]), "--served-name", "tiny", *SERVED]
    async with local_servers(arguments, {"mixed": 1}, environ, lambda _: None) as local:
        async with asyncio.timeout(START_S):
            await local.ready()
        yield ReferenceAnswers(local.servers[0].url, models.folders)


@dataclass
class ChaosRun:
    settings: ChaosSettings
    environ: Mapping[str, str]
    progress: Callable[[str], None]
    over: asyncio.Event = field(default_factory=asyncio.Event)  # set: no more faults, and the rest as usual

    async def run(self, folder: Path) -> ChaosReport:
        tracebacks = TracebackCollector()
        for name in ("headgate.cluster", "headgate.testing.chaos.fleet"):
            logging.getLogger(name).addHandler(tracebacks)
        models = ChaosModels.write(folder)
        items = catalogue(self.settings.seed)
        report = ChaosReport(self.settings)
        async with reference_server(models, self.environ) as reference:
            self.progress(f"asking {len(items)} questions of a server that is left alone")
            await reference.learn(items)
            judge = AnswerJudge(reference)
            arguments = [str(models.folders["a"]), "--served-name", "tiny", *SERVED]
            fleet = ChaosFleet(arguments, self.settings.counts, self.environ)
            self.progress(f"starting {self.settings.servers} servers and a router")
            async with fleet:
                await self._run_faults(fleet, judge, models, items, report)
            report.leftover_processes = [
                f"process {pid} has outlived the fleet" for pid in await fleet.leftover_processes()
            ]
            self.progress(f"comparing {len(judge.mixed)} answers that several sets of weights have made")
            await judge.check_mixed()
        report.record_answers(judge)
        report.tracebacks = tracebacks.found
        return report

    async def _run_faults(
        self,
        fleet: ChaosFleet,
        judge: AnswerJudge,
        models: ChaosModels,
        items: Sequence[CatalogueItem],
        report: ChaosReport,
    ) -> None:
        await self._warm_up(fleet, judge, items)
        before = await leaks.at_rest(fleet)
        load = ClientLoad(fleet.url, items, judge, self.settings.clients, self.settings.seed, LOAD_KEY)
        hostile = HostileClients(fleet.url, items, judge, load.ids, self.settings.seed)
        operators = FleetOperator(fleet, judge, models.folders, models.cut)
        injector = FaultInjector(fleet, operators, load.vanish, load.abort, hostile, self.settings.seed)
        watch = leaks.ProcessWatch(fleet, load.begun_s)
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch.run())
            reporting = tasks.create_task(self._report_progress(load, injector, judge))
            sending = tasks.create_task(load.run())
            report.action_failures = await self._inject_all(injector, load.begun_s)
            await self._let_clients_finish(operators, load, sending, report)
            watching.cancel()
            reporting.cancel()
        report.seconds = round(clock() - load.begun_s, 1)
        await self._check_leaks(fleet, before, watch, report)
        report.record(load, injector, operators, watch)
        report.hostile = dict(hostile.answers)
        counted = await metrics(fleet.url)
        report.router = {name: int(counted[f"headgate:router_{name}_total"]) for name in COUNTED}
        report.kv_transfers = int(sum([await self._transfers(worker.url) for worker in fleet.workers]))
        report.restarts = sum(worker.starts - 1 for worker in fleet.workers)

    async def _transfers(self, url: str) -> float:
        """Prompts whose KV came from another server, since this one was started."""
        return sum(value for name, value in (await metrics(url)).items() if "headgate:kv_transfers_total" in name)

    async def _warm_up(self, fleet: ChaosFleet, judge: AnswerJudge, items: Sequence[CatalogueItem]) -> None:
        self.progress(f"{self.settings.clients} clients warm it up for {self.settings.warm_up_s:g} s")
        load = ClientLoad(fleet.url, items, judge, self.settings.clients, self.settings.seed + 1, LOAD_KEY)
        sending = asyncio.ensure_future(load.run())
        try:
            if "giant_prompts" in self.settings.kinds:  # what buffers they take, processes keep
                hostile = HostileClients(fleet.url, items, judge, load.ids, self.settings.seed)
                await asyncio.gather(hostile.giant_prompts(0.0), hostile.giant_prompts(0.0))
            await self._sleep(self.settings.warm_up_s)
            load.over.set()
            async with asyncio.timeout(CALM_S):
                await sending
        finally:
            sending.cancel()
        if left := await leaks.wait_until_idle(fleet):
            raise HeadgateError(f"the fleet does not come to rest before anything went wrong: {'; '.join(left)}")

    async def _inject_all(self, injector: FaultInjector, begun_s: float) -> list[str]:
        """All faults in their time; what went wrong with the operators' own calls, in sentences."""
        settings = self.settings
        actions = []
        for fault in draw(settings.seed, settings.seconds, settings.every_s, settings.kinds):
            if await self._sleep(begun_s + fault.at_s - clock()):
                break
            actions.append(asyncio.ensure_future(injector.do(fault, begun_s)))
        try:
            if actions:
                await asyncio.wait(actions, timeout=LAST_ACTIONS_S)
        finally:
            unfinished = [action for action in actions if not action.done()]
            for action in unfinished:
                action.cancel()
            ended = await asyncio.gather(*actions, return_exceptions=True)
        failures = [f"{len(unfinished)} deeds were not over after {LAST_ACTIONS_S:g} s"] if unfinished else []
        wrong = [error for error in ended if isinstance(error, Exception)]
        return failures + [f"{type(error).__name__}: {error}" for error in wrong]

    async def _let_clients_finish(
        self, operators: FleetOperator, load: ClientLoad, sending: asyncio.Task[None], report: ChaosReport
    ) -> None:
        """Nothing goes wrong any more; everybody is to get what they have asked for."""
        try:
            await operators.resume_at_end()
        except HeadgateError as error:
            report.action_failures.append(str(error))
        load.over.set()
        await asyncio.wait({sending}, timeout=CALM_S)
        if not sending.done():
            report.action_failures.append(f"clients still wait {CALM_S:g} s after the last fault")
            sending.cancel()

    async def _check_leaks(
        self, fleet: ChaosFleet, before: Mapping[str, leaks.IdleUsage], watch: leaks.ProcessWatch, report: ChaosReport
    ) -> None:
        try:
            await fleet.all_ready(READY_S)
        except HeadgateError as error:
            report.still_held.append(str(error))
        report.still_held += await leaks.wait_until_idle(fleet)
        if report.still_held:
            return
        report.still_held += await leaks.weight_differences(fleet)
        after = await leaks.at_rest(fleet)
        report.at_rest = {name: (before[name], after[name]) for name in before.keys() & after.keys()}
        report.leaks = leaks.leaked(before, after) + leaks.memory_leaks(watch.samples)

    async def _sleep(self, seconds: float) -> bool:
        """Whether it was cut short because all is over."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self.over.wait()
        except TimeoutError:
            return self.over.is_set()
        return True

    async def _report_progress(self, load: ClientLoad, injector: FaultInjector, judge: AnswerJudge) -> None:
        while True:
            await asyncio.sleep(10)
            passed_s = clock() - load.begun_s
            self.progress(
                f"{passed_s:5.0f} s: {load.sent} requests, {sum(injector.done.values())} faults, "
                f"{judge.wrong} wrong answers, {sum(judge.unexplained.values())} unexplained errors"
            )
