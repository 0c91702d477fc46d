"""Measures weight updates of a paused engine: from a folder, from shared memory, and over a process group.

    python benchmarks/weight_update.py MODEL [--repeats 3]

The trainer is a separate process on the same host. Times are those of the whole command, as measured by its caller,
and include the trainer's writing or sending where the output states it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.synchronize
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from headgate.device.weights.loading import SafetensorsFolder
from headgate.offline import LLM
from headgate.protocol.command import BroadcastSource, FileSource, Pause, Sleep, UpdateWeights, Wake
from headgate.weights import publish, send_weights


def trainer(folder: str, port: int, count: int, ready: multiprocessing.synchronize.Event) -> None:
    tensors = dict(SafetensorsFolder(folder))
    ready.set()
    for _ in range(count):
        send_weights(tensors, f"tcp://127.0.0.1:{port}", 2)


def measure(name: str, repeats: int, work: Callable[[], object]) -> None:
    times = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    print(f"{name:44} median {statistics.median(times):6.2f} s   best {min(times):6.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    folder, repeats = str(options.model), options.repeats
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    sender = context.Process(target=trainer, args=(folder, port, repeats, ready), daemon=True)
    with LLM(folder, max_context=1024, max_running=4) as llm:
        llm.call(Pause("abort"))
        measure("Files, a folder", repeats, lambda: llm.call(UpdateWeights(FileSource(folder))))
        tensors = dict(SafetensorsFolder(folder))
        with publish(tensors) as files:
            measure("Files, shared memory", repeats, lambda: llm.call(UpdateWeights(files)))
        with publish(tensors, checksum=True) as files:
            measure("Files, shared memory, with SHA-256", repeats, lambda: llm.call(UpdateWeights(files)))

        def published() -> None:
            with publish(tensors) as files:
                llm.call(UpdateWeights(files))

        measure("Files, shared memory, and publishing", repeats, published)
        sender.start()
        ready.wait()
        measure(
            "Group, gloo over loopback",
            repeats,
            lambda: llm.call(UpdateWeights(BroadcastSource(f"tcp://127.0.0.1:{port}", 2))),
        )
        llm.call(UpdateWeights(FileSource(folder)))
        measure(
            "Sleep and wake, weights", repeats, lambda: (llm.call(Sleep(("weights",))), llm.call(Wake(("weights",))))
        )


if __name__ == "__main__":
    main()
