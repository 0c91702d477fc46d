"""The engine as a process of its own: `python -m headgate.engine.process CONFIG`.

Its parent holds the other end of its standard input; when that closes, for whatever reason, the engine ends. Signals from
the terminal are the parent's business. An engine that cannot start says why in one sentence and exits with `CANNOT_START`.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path

import msgspec

from headgate.config import EngineConfig
from headgate.engine.build import Engine, build_engine
from headgate.engine.channel import EngineChannel
from headgate.errors import HeadgateError
from headgate.protocol.output import Outputs

CANNOT_START = 3

log = logging.getLogger(__name__)


class EngineStart(msgspec.Struct, frozen=True):
    """What a parent tells the engine it starts."""

    model: str  # a folder or a GGUF file
    address: str  # where to listen
    config: EngineConfig
    log_level: str = "INFO"


def main(argument: str) -> int:
    start = msgspec.json.decode(argument, type=EngineStart)
    logging.basicConfig(level=start.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        return serve(start)
    except HeadgateError as error:
        print(f"headgate: {error}", file=sys.stderr)
        return CANNOT_START


def serve(start: EngineStart) -> int:
    channel: EngineChannel

    def send(client: int, outputs: Outputs) -> None:
        channel.send(client, outputs)

    engine = build_engine(Path(start.model), start.config, send)
    channel = EngineChannel(start.address, engine.info, post=engine.loop.post, status=engine.loop.quiet)
    threading.Thread(target=end_with_parent, args=(engine,), name="headgate-parent", daemon=True).start()
    channel.start()
    try:
        engine.loop.run()
    finally:
        channel.close()
        engine.close()
    return 0


def end_with_parent(engine: Engine) -> None:
    sys.stdin.buffer.read()
    engine.loop.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
