"""A real engine on a tiny model, driven step by step, and trainers that send it weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from headgate.config import EngineConfig
from headgate.contract.sampling import SamplingParams
from headgate.engine.build import build_engine
from headgate.protocol.command import Command, Result
from headgate.protocol.message import CommandAnswer, CommandCall, StepOutputs, Submit
from headgate.protocol.request import GenerateRequest

PROMPTS = {id: tuple((id * 37 + i * 11) % 250 for i in range(5 + 9 * id)) for id in range(1, 7)}
TOKENS = 24


class Driver:
    """An engine with six seeded requests, four of which run at once."""

    def __init__(self, model: Path, **options: object) -> None:
        settings = {"max_running": 4, "max_context": 128, "dtype": "float32", "device": "cpu"} | options
        self.engine = build_engine(model, EngineConfig(**settings), self.hear)  # type: ignore[arg-type]
        self.answers: dict[int, Result] = {}
        self.tokens: dict[int, list[int]] = {}
        self.versions: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.numbers = count(1)

    def hear(self, client: int, message: StepOutputs | CommandAnswer) -> None:
        if isinstance(message, CommandAnswer):
            self.answers[message.number] = message.result
            return
        outputs = message.outputs
        assert not outputs.refused
        for id, token in zip(outputs.ids, outputs.tokens, strict=True):
            self.tokens.setdefault(id, []).append(token)
            self.versions.setdefault(id, []).append(outputs.version)
        self.ended |= {ended.id: ended.finish_reason for ended in outputs.ended}

    def submit(self, *ids: int, tokens: int = TOKENS, prompts: dict[int, tuple[int, ...]] = PROMPTS) -> None:
        params = {id: SamplingParams(max_tokens=tokens, seed=id, ignore_eos=True) for id in ids}
        self.engine.loop.post(Submit([GenerateRequest(id, prompts[id], params[id]) for id in ids]))

    def begin(self, command: Command) -> int:
        """Post a command and let it start."""
        number = next(self.numbers)
        self.engine.loop.post(CommandCall(0, number, command))
        self.engine.loop.turn()
        return number

    def answer(self, number: int) -> Result:
        while number not in self.answers:
            self.engine.loop.turn()
        return self.answers.pop(number)

    def call(self, command: Command) -> Result:
        return self.answer(self.begin(command))

    def turn_until_some_run(self, tokens: int = 3) -> None:
        while sum(map(len, self.tokens.values())) < 4 * tokens:
            self.engine.loop.turn()

    def finish(self) -> dict[int, list[int]]:
        self.engine.loop.wake()
        self.engine.loop.turn()
        while not self.engine.loop.idle:
            self.engine.loop.turn()
        self.engine.scheduler.check()
        return self.tokens


@contextmanager
def driving(model: Path, **options: object) -> Iterator[Driver]:
    driver = Driver(model, **options)
    try:
        yield driver
    finally:
        driver.engine.close()


TRAINER = """
import sys
from headgate.weights import send_weights
from headgate.device.weights.broadcast import BroadcastGroup
from headgate.device.weights.loading import SafetensorsFolder
from headgate.errors import HeadgateError

folder, address, world_size, dies = sys.argv[1:]
if dies == "in the middle":
    class BroadcastGroup(BroadcastGroup):
        left = 3  # broadcasts: the length of the header, the header, and one bucket
        def broadcast(self, data):
            if not self.left:
                print("half", flush=True)
                sys.stdin.read()
            self.left -= 1
            super().broadcast(data)
    import headgate.weights
    headgate.weights.BroadcastGroup = BroadcastGroup
try:
    send_weights(dict(SafetensorsFolder(folder)), address, int(world_size), timeout_s=60, bucket_bytes=8192)
    print("sent")
except HeadgateError as error:
    print(type(error).__name__, error)
"""


@contextmanager
def trainer(
    folder: Path, address: str, *, world_size: int = 2, dies: str = "never"
) -> Iterator[subprocess.Popen[str]]:
    """A process that sends the weights in `folder`."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(folder), address, str(world_size), dies],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)
