"""One run, from the models that are written for it to what is left of it in the end."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headgate.errors import HeadgateError, RequestError
from headgate.testing.chaos import home
from headgate.testing.chaos.catalogue import Item, catalogue
from headgate.testing.chaos.client import clock
from headgate.testing.chaos.deeds import Injector, Operators
from headgate.testing.chaos.fleet import POLITE, START_S, ChaosFleet, local_servers, metrics
from headgate.testing.chaos.hostile import HostileClients
from headgate.testing.chaos.judge import Judge
from headgate.testing.chaos.load import ClientLoad
from headgate.testing.chaos.plan import KINDS, draw
from headgate.testing.chaos.reference import Reference, Weights
from headgate.testing.chaos.report import ChaosReport
from headgate.testing.tiny import tiny_model

log = logging.getLogger(__name__)

WARM_UP_S = (5.0, 30.0)  # at least and at most; a tenth of the run in between
LAST_DEEDS_S = 240.0  # for what was begun to be mended
CALM_S = 240.0  # for clients to finish when nothing goes wrong any more
READY_S = 120.0  # for servers to come back
KV_BLOCKS = 384  # few enough that now and then somebody has to wait, or give way
SERVED = ("--device", "cpu", "--kv-blocks", str(KV_BLOCKS), "--drain-timeout", "5", "--kv-times", "10,5,10")
COUNTED = ("retries", "resumes", "prefills_lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    seconds: float = 600.0
    every_s: float = 2.0
    clients: int = 64
    servers: int = 3
    seed: int = 0
    kinds: Sequence[str] = tuple(KINDS)

    def __post_init__(self) -> None:
        for name, least in (("clients", 1), ("servers", 2)):
            if getattr(self, name) < least:
                raise RequestError(f"--{name} must be at least {least}")
        if not (self.seconds > 0 and self.every_s > 0):
            raise RequestError("--minutes and --every must be above 0")

    @property
    def counts(self) -> dict[str, int]:
        """One computes prompts for the others."""
        return {"mixed": self.servers - 1, "prefill": 1}

    @property
    def warm_up_s(self) -> float:
        least, most = WARM_UP_S
        return min(max(self.seconds / 10, least), most)


class Bugs(logging.Handler):
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
    folders: dict[Weights, Path]
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
async def reference_server(models: ChaosModels, environ: Mapping[str, str]) -> AsyncIterator[Reference]:
    arguments = [str(models.folders["a"]), "--served-name", "tiny", *SERVED]
    async with local_servers(arguments, {"mixed": 1}, environ, lambda _: None) as local:
        async with asyncio.timeout(START_S):
            await local.ready()
        yield Reference(local.servers[0].url, models.folders)


@dataclass
class ChaosRun:
    settings: Settings
    environ: Mapping[str, str]
    say: Callable[[str], None]
    over: asyncio.Event = field(default_factory=asyncio.Event)  # set: no more faults, and the rest as usual

    async def run(self, folder: Path) -> ChaosReport:
        bugs = Bugs()
        for name in ("headgate.cluster", "headgate.testing.chaos.fleet"):
            logging.getLogger(name).addHandler(bugs)
        models = ChaosModels.write(folder)
        items = catalogue(self.settings.seed)
        report = ChaosReport(self.settings)
        async with reference_server(models, self.environ) as reference:
            self.say(f"asking {len(items)} questions of a server that is left alone")
            await reference.learn(items)
            judge = Judge(reference)
            arguments = [str(models.folders["a"]), "--served-name", "tiny", *SERVED]
            fleet = ChaosFleet(arguments, self.settings.counts, self.environ)
            self.say(f"starting {self.settings.servers} servers and a router")
            async with fleet:
                await self._try(fleet, judge, models, items, report)
            report.left_over = [f"process {pid} has outlived the fleet" for pid in await fleet.left_over()]
            self.say(f"comparing {len(judge.spliced)} answers that several sets of weights have made")
            await judge.look_at_spliced()
        report.take(judge)
        report.bugs = bugs.found
        return report

    async def _try(
        self, fleet: ChaosFleet, judge: Judge, models: ChaosModels, items: Sequence[Item], report: ChaosReport
    ) -> None:
        await self._warm_up(fleet, judge, items)
        before = await home.at_rest(fleet)
        load = ClientLoad(fleet.url, items, judge, self.settings.clients, self.settings.seed, POLITE)
        hostile = HostileClients(fleet.url, items, judge, load.ids, self.settings.seed)
        operators = Operators(fleet, judge, models.folders, models.cut)
        injector = Injector(fleet, operators, load.vanish, load.abort, hostile, self.settings.seed)
        watch = home.ProcessWatch(fleet, load.begun_s)
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch.run())
            telling = tasks.create_task(self._tell(load, injector, judge))
            asking = tasks.create_task(load.run())
            report.deed_failures = await self._do_all(injector, load.begun_s)
            await self._calm(operators, load, asking, report)
            watching.cancel()
            telling.cancel()
        report.seconds = round(clock() - load.begun_s, 1)
        await self._go_home(fleet, before, watch, report)
        report.observe(load, injector, operators, watch)
        report.hostile = dict(hostile.answers)
        counted = await metrics(fleet.url)
        report.router = {name: int(counted[f"headgate:router_{name}_total"]) for name in COUNTED}
        report.kv_transfers = int(sum([await self._transfers(worker.url) for worker in fleet.workers]))
        report.restarts = sum(worker.starts - 1 for worker in fleet.workers)

    async def _transfers(self, url: str) -> float:
        """Prompts whose KV came from another server, since this one was started."""
        return sum(value for name, value in (await metrics(url)).items() if "headgate:kv_transfers_total" in name)

    async def _warm_up(self, fleet: ChaosFleet, judge: Judge, items: Sequence[Item]) -> None:
        self.say(f"{self.settings.clients} clients warm it up for {self.settings.warm_up_s:g} s")
        load = ClientLoad(fleet.url, items, judge, self.settings.clients, self.settings.seed + 1, POLITE)
        asking = asyncio.ensure_future(load.run())
        try:
            if "giant_prompts" in self.settings.kinds:  # what buffers they take, processes keep
                hostile = HostileClients(fleet.url, items, judge, load.ids, self.settings.seed)
                await asyncio.gather(hostile.giant_prompts(0.0), hostile.giant_prompts(0.0))
            await self._sleep(self.settings.warm_up_s)
            load.over.set()
            async with asyncio.timeout(CALM_S):
                await asking
        finally:
            asking.cancel()
        if left := await home.come_home(fleet):
            raise HeadgateError(f"the fleet does not come to rest before anything went wrong: {'; '.join(left)}")

    async def _do_all(self, injector: Injector, begun_s: float) -> list[str]:
        """All faults in their time; what went wrong with the operators' own calls, in sentences."""
        settings = self.settings
        deeds = []
        for fault in draw(settings.seed, settings.seconds, settings.every_s, settings.kinds):
            if await self._sleep(begun_s + fault.at_s - clock()):
                break
            deeds.append(asyncio.ensure_future(injector.do(fault, begun_s)))
        try:
            if deeds:
                await asyncio.wait(deeds, timeout=LAST_DEEDS_S)
        finally:
            unfinished = [deed for deed in deeds if not deed.done()]
            for deed in unfinished:
                deed.cancel()
            ended = await asyncio.gather(*deeds, return_exceptions=True)
        failures = [f"{len(unfinished)} deeds were not over after {LAST_DEEDS_S:g} s"] if unfinished else []
        wrong = [error for error in ended if isinstance(error, Exception)]
        return failures + [f"{type(error).__name__}: {error}" for error in wrong]

    async def _calm(
        self, operators: Operators, load: ClientLoad, asking: asyncio.Task[None], report: ChaosReport
    ) -> None:
        """Nothing goes wrong any more; everybody is to get what they have asked for."""
        try:
            await operators.settle()
        except HeadgateError as error:
            report.deed_failures.append(str(error))
        load.over.set()
        await asyncio.wait({asking}, timeout=CALM_S)
        if not asking.done():
            report.deed_failures.append(f"clients still wait {CALM_S:g} s after the last fault")
            asking.cancel()

    async def _go_home(
        self, fleet: ChaosFleet, before: Mapping[str, home.AtRest], watch: home.ProcessWatch, report: ChaosReport
    ) -> None:
        try:
            await fleet.all_ready(READY_S)
        except HeadgateError as error:
            report.away.append(str(error))
        report.away += await home.come_home(fleet)
        if report.away:
            return
        report.away += await home.different_weights(fleet)
        after = await home.at_rest(fleet)
        report.at_rest = {name: (before[name], after[name]) for name in before.keys() & after.keys()}
        report.leaks = home.leaked(before, after) + home.too_large(watch.samples)

    async def _sleep(self, seconds: float) -> bool:
        """Whether it was cut short because all is over."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self.over.wait()
        except TimeoutError:
            return self.over.is_set()
        return True

    async def _tell(self, load: ClientLoad, injector: Injector, judge: Judge) -> None:
        while True:
            await asyncio.sleep(10)
            passed_s = clock() - load.begun_s
            self.say(
                f"{passed_s:5.0f} s: {load.asked} requests, {sum(injector.done.values())} faults, "
                f"{judge.wrong} wrong answers, {sum(judge.unexplained.values())} unexplained errors"
            )
