"""The engine process: `python -m headgate.engine.process CONFIG`.

The parent holds the other end of this process's standard input; when that end closes, for whatever reason, the engine
ends. The process ignores signals from the terminal. An engine that cannot start prints one sentence and exits with
`CANNOT_START`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from headgate import logs
from headgate.collector import spare_the_collector
from headgate.device.tensor_parallel.parallelism import UpdatedWeights
from headgate.engine.build import Engine, build_engine
from headgate.engine.channel import EngineChannel
from headgate.engine.start import CANNOT_START, LOST_RANK, EngineStart
from headgate.errors import HeadgateError, RankLost
from headgate.protocol.message import CommandAnswer, StepOutputs

log = logging.getLogger(__name__)


def main(argument: str) -> int:
    start = msgspec.json.decode(argument, type=EngineStart)
    logs.set_up(start.log_format, start.log_level, start.name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel: EngineChannel
    parent = Parent()

    def send(client: int, message: StepOutputs | CommandAnswer) -> None:
        channel.send(client, message)

    updated = None if start.weights is None else UpdatedWeights(start.weights, start.version)
    try:
        engine = build_engine(Path(start.model), start.config, send, updated)
    except HeadgateError as error:
        print(f"headgate: {error}", file=sys.stderr)
        return CANNOT_START
    channel = EngineChannel(start.address, engine.info, post=engine.loop.post, status=engine.loop.quiet)
    parent.engine = engine
    spare_the_collector()
    channel.start()
    try:
        engine.loop.run()
    except RankLost as error:
        log.error("%s; the engine ends", error)
        return LOST_RANK
    finally:
        channel.close()
        engine.close()
    return 0


class Parent:
    """Watches standard input from the start, and ends the process when it closes."""

    def __init__(self) -> None:
        self.engine: Engine | None = None  # once it is built
        threading.Thread(target=self._watch, name="headgate-parent", daemon=True).start()

    def _watch(self) -> None:
        # Not through `sys.stdin`, whose lock the interpreter takes at exit.
        while os.read(0, 4096):
            pass
        if self.engine is None:
            os._exit(0)  # the model is still loading, and the parent is gone
        self.engine.loop.close()


if __name__ == "__main__":
    code = main(sys.argv[1])
    if code == LOST_RANK:
        os._exit(code)  # a normal exit could hang on a thread that waits for the lost rank
    sys.exit(code)
