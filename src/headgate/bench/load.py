"""Generates load on a server: decides which requests are sent, and when.

In a *closed loop*, each of N clients sends its next request after its last answer; this measures maximum throughput.
In an *open loop*, requests arrive as a Poisson process, independent of the server; this measures latency under load.
Otherwise, requests arrive at the times recorded in a trace. In a conversation, these rules apply to the first
request; each further request is sent after the previous answer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle, zip_longest

import msgspec
from tqdm import tqdm

from headgate.bench.client import TimedReply, TimedRequest, address_of, ask, clock
from headgate.bench.dataset import Conversation, Dataset, RandomPrompts, Shape, Trace, conversations
from headgate.config import SYSTEM_CAS, TlsFiles
from headgate.errors import HeadgateError, RequestError
from headgate.httpclient import HttpAddress, HttpFailure, call
from headgate.tls import why


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


@dataclass(frozen=True, slots=True)
class AsRecorded:
    def __str__(self) -> str:
        return "as recorded"


Pace = OpenLoop | ClosedLoop | AsRecorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    url: str
    pace: Pace
    api: str = "chat"  # chat or completions
    model: str | None = None  # None: the first model that the server lists
    requests: int = 100
    prompt_words: int = 64
    max_tokens: int = 64
    ignore_eos: bool = False
    dataset: Dataset = field(default_factory=RandomPrompts)
    seed: int = 0
    timeout_s: float = 600.0
    api_key: str | None = field(default=None, repr=False)
    tls: TlsFiles = SYSTEM_CAS  # for https://

    def __post_init__(self) -> None:
        for name in ("requests", "prompt_words", "max_tokens"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1")
        match self.pace:
            case OpenLoop(amount) | ClosedLoop(amount) if not amount > 0:
                raise RequestError("rate and concurrency must be above 0")
            case AsRecorded() if not isinstance(self.dataset, Trace):
                raise RequestError("only a trace has recorded arrival times")

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.api == "chat" else "/v1/completions"

    def conversations(self) -> list[Conversation]:
        return conversations(self.dataset, Shape(self.requests, self.prompt_words, self.max_tokens, self.seed))

    def body(self, model: str, messages: Sequence[str], max_tokens: int) -> bytes:
        """Return the body of a request. `messages` alternates prompts and answers, and ends with a prompt."""
        body: dict[str, object] = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.api == "chat":
            roles = cycle(("user", "assistant"))
            body["messages"] = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=False)]
        else:
            # There is no separator between a prompt and its answer, so that the cached KV of the answer matches.
            exchanges = zip_longest(messages[::2], messages[1::2], fillvalue="")
            body["prompt"] = "\n".join(prompt + answer for prompt, answer in exchanges)
        return msgspec.json.encode(body)

    def arrivals_s(self, rate: float, count: int) -> list[float]:
        """Return the start times of the conversations of an open loop, a Poisson process."""
        chance = random.Random(self.seed + 1)
        return list(accumulate(chance.expovariate(rate) for _ in range(count)))


@dataclass(frozen=True, slots=True)
class Result:
    load: Load
    model: str
    elapsed_s: float
    samples: list[TimedRequest]

    @property
    def completed(self) -> list[TimedRequest]:
        return [sample for sample in self.samples if sample.error is None]


def run(load: Load, *, progress: bool = False) -> Result:
    return asyncio.run(measure(load, progress=progress))


async def measure(load: Load, *, progress: bool = False) -> Result:
    address = address_of(load.url, load.tls)
    talks = load.conversations()
    model = load.model or await first_model(address, load.api_key)
    samples: list[TimedRequest] = []
    begun_s = clock()
    with tqdm(total=sum(len(talk.turns) for talk in talks), unit="request", disable=not progress) as bar:

        async def send(body: bytes) -> TimedReply:
            start_s = clock() - begun_s
            reply = await ask(address, load.path, body, api_key=load.api_key, timeout_s=load.timeout_s)
            reply.sample.start_s = start_s
            samples.append(reply.sample)
            bar.update()
            return reply

        async def converse(talk: Conversation) -> None:
            messages: list[str] = []
            for turn in talk.turns:
                messages.append(turn.prompt)
                reply = await send(load.body(model, messages, turn.max_tokens))
                if reply.sample.error is not None:
                    return  # the next turn would need the answer that failed
                messages.append(reply.text)

        match load.pace:
            case OpenLoop(rate):
                await _run_open(talks, load.arrivals_s(rate, len(talks)), converse)
            case AsRecorded():
                await _run_open(talks, [talk.at_s for talk in talks], converse)
            case ClosedLoop(concurrency):
                await _run_closed(talks, concurrency, converse)
    return Result(load, model, clock() - begun_s, samples)


Converse = Callable[[Conversation], Coroutine[None, None, None]]


async def _run_open(talks: list[Conversation], arrivals_s: list[float], converse: Converse) -> None:
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    async with asyncio.TaskGroup() as tasks:
        for talk, arrival_s in zip(talks, arrivals_s, strict=True):
            await asyncio.sleep(begun_s + arrival_s - loop.time())  # not positive if the request is late
            tasks.create_task(converse(talk))


async def _run_closed(talks: list[Conversation], concurrency: int, converse: Converse) -> None:
    rest = iter(talks)

    async def client() -> None:
        for talk in rest:
            await converse(talk)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(client())


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def first_model(address: HttpAddress, api_key: str | None) -> str:
    try:
        async with asyncio.timeout(10), call(address, "GET", "/v1/models", api_key=api_key) as answer:
            body = await answer.body()
        if answer.status != 200:
            raise HeadgateError(f"the server answered /v1/models with status {answer.status}; check --api-key")
        return msgspec.json.decode(body, type=_Models).data[0].id
    except (OSError, EOFError, TimeoutError, HttpFailure, IndexError, msgspec.MsgspecError) as error:
        raise HeadgateError(
            f"no OpenAI server at {address.host}, port {address.port} ({why(error)}); start one with `headgate serve`"
        ) from None
