"""Load on a server: which requests, and when each is sent.

Closed loop: N clients, each sending its next request when the last one is answered; asks what a server can do at most.
Open loop: requests arrive at random times whatever the server does, as from a crowd; asks how long people wait.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec
from tqdm import tqdm

from headgate.bench.client import Sample, address_of, ask, clock
from headgate.errors import HeadgateError, RequestError
from headgate.httpclient import Address, HttpFailure, call

VOCABULARY = (
    "time river stone bright window garden winter letter music table silver road morning paper green quiet "
    "mountain story bread water child door light summer captain island engine market number house"
)
WORDS = tuple(VOCABULARY.split())


@dataclass(frozen=True, slots=True)
class OpenLoop:
    rate: float  # requests per second

    def __str__(self) -> str:
        return f"open loop, {self.rate:g} requests/s"


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    concurrency: int

    def __str__(self) -> str:
        return f"closed loop, {self.concurrency} clients"


Pace = OpenLoop | ClosedLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    url: str
    pace: Pace
    api: str = "chat"  # or completions
    model: str | None = None  # None: the first that the server lists
    requests: int = 100
    prompt_words: int = 64
    max_tokens: int = 64
    ignore_eos: bool = False
    seed: int = 0
    timeout_s: float = 600.0
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("requests", "prompt_words", "max_tokens"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1")
        if not (self.pace.rate if isinstance(self.pace, OpenLoop) else self.pace.concurrency) > 0:
            raise RequestError("rate and concurrency must be above 0")

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.api == "chat" else "/v1/completions"

    def bodies(self, model: str) -> list[bytes]:
        chance = random.Random(self.seed)
        return [self._body(model, " ".join(chance.choices(WORDS, k=self.prompt_words))) for _ in range(self.requests)]

    def _body(self, model: str, prompt: str) -> bytes:
        body: dict[str, object] = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self.max_tokens,
            "temperature": 0,
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        return msgspec.json.encode(body)

    def arrivals_s(self, rate: float) -> list[float]:
        """When each request of an open loop is sent: a Poisson process."""
        chance = random.Random(self.seed + 1)
        return list(accumulate(chance.expovariate(rate) for _ in range(self.requests)))


@dataclass(frozen=True, slots=True)
class Result:
    load: Load
    model: str
    elapsed_s: float
    samples: list[Sample]

    @property
    def completed(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.error is None]


def run(load: Load, *, progress: bool = False) -> Result:
    return asyncio.run(measure(load, progress=progress))


async def measure(load: Load, *, progress: bool = False) -> Result:
    address = address_of(load.url)
    model = load.model or await first_model(address, load.api_key)
    bodies = load.bodies(model)
    samples: list[Sample] = []
    begun_s = clock()
    with tqdm(total=load.requests, unit="request", disable=not progress) as bar:

        async def send(body: bytes) -> None:
            start_s = clock() - begun_s
            sample = await ask(address, load.path, body, api_key=load.api_key, timeout_s=load.timeout_s)
            sample.start_s = start_s
            samples.append(sample)
            bar.update()

        match load.pace:
            case OpenLoop(rate):
                await _send_openly(bodies, load.arrivals_s(rate), send)
            case ClosedLoop(concurrency):
                await _send_in_turn(bodies, concurrency, send)
    return Result(load, model, clock() - begun_s, samples)


Send = Callable[[bytes], Coroutine[None, None, None]]


async def _send_openly(bodies: list[bytes], arrivals_s: list[float], send: Send) -> None:
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    async with asyncio.TaskGroup() as tasks:
        for body, arrival_s in zip(bodies, arrivals_s, strict=True):
            await asyncio.sleep(begun_s + arrival_s - loop.time())  # late is sent at once
            tasks.create_task(send(body))


async def _send_in_turn(bodies: list[bytes], concurrency: int, send: Send) -> None:
    rest = iter(bodies)

    async def client() -> None:
        for body in rest:
            await send(body)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(client())


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def first_model(address: Address, api_key: str | None) -> str:
    try:
        async with asyncio.timeout(10), call(address, "GET", "/v1/models", api_key=api_key) as answer:
            body = await answer.body()
        if answer.status != 200:
            raise HeadgateError(f"the server answered /v1/models with status {answer.status}; check --api-key")
        return msgspec.json.decode(body, type=_Models).data[0].id
    except (OSError, EOFError, TimeoutError, HttpFailure, IndexError, msgspec.MsgspecError) as error:
        raise HeadgateError(
            f"no OpenAI server at {address.host}, port {address.port} ({error or type(error).__name__}); "
            "start one with `headgate serve`"
        ) from None
