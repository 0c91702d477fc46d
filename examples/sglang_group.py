"""Training over SGLang's process group: `python examples/sglang_group.py --kill 12`, under a minute on two cores.

The trainer calls the server as slime and AReaL call SGLang: rollouts from `/generate`, and after each step the weights
over a group (gloo here, NCCL with a GPU per rank), in two buckets between `/pause_generation` and
`/continue_generation`. The policy, its reward and the REINFORCE step are those of `rl_loop.py`.

With `--kill ROUND` the trainer process is killed between the two buckets of that round. The script then verifies that
the server has dropped the first bucket: its greedy tokens and its weight version are those from before the update. A
second trainer process starts from the last checkpoint, joins under the same name and trains the remaining rounds.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rl_loop import Trainer, served
from torch.distributed import distributed_c10d
from transformers.utils.logging import disable_progress_bar

from headgate.testing.tiny import tiny_model

GROUP = "example-pp_0"
BATCH, TOKENS = 24, 32
BUCKETS = 2
DEADLINE_S = 120.0


# -- the server's API -------------------------------------------------------------------------------------------------


class Refused(Exception):
    pass


@dataclass(frozen=True)
class Server:
    url: str

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise Refused(f"{path}: {error.code} {error.read().decode()}") from None

    def generate(self, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
        params = {"max_new_tokens": TOKENS, "ignore_eos": True, **sampling}
        answers = self.call("/generate", {"input_ids": prompts, "sampling_params": params})
        return [answer["output_ids"] for answer in answers]

    def fingerprint(self) -> dict[str, Any]:
        """What must not change unless the weights do."""
        (tokens,) = self.generate([[1, 2, 3]], temperature=0)
        return {"tokens": tokens, "version": self.call("/get_weight_version")["weight_version"]}


# -- the trainer process ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rollout:
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)


class WeightGroup:
    """The trainer's process group with one server, and the updates over it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._threads = ThreadPoolExecutor(1)  # for calls that the server answers when the trainer has sent
        port = free_port()
        place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        joined = self._post("/init_weights_update_group", place | {"group_name": GROUP, "backend": "gloo"})
        self._group = opened_group(port)
        joined.result(DEADLINE_S)

    def send(self, weights: dict[str, torch.Tensor], version: int, *, stop_after: int = BUCKETS) -> None:
        """Send the buckets of an update; `stop_after` fewer of them for a trainer that is about to be killed."""
        names = list(weights)
        for names_of_bucket in [names[i::BUCKETS] for i in range(BUCKETS)][:stop_after]:
            received = self._post(
                "/update_weights_from_distributed", self._announced(names_of_bucket, weights, version)
            )
            for name in names_of_bucket:
                dist.broadcast(weights[name], 0, group=self._group)
            received.result(DEADLINE_S)

    def close(self) -> None:
        self._server.call("/destroy_weights_update_group", {"group_name": GROUP})
        self._threads.shutdown()

    def _announced(self, names: list[str], weights: dict[str, torch.Tensor], version: int) -> dict[str, Any]:
        tensors = [weights[name] for name in names]
        return {
            "names": names,
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": GROUP,
            "flush_cache": False,
            "weight_version": str(version),
        }

    def _post(self, path: str, body: dict[str, Any]) -> Future[Any]:
        return self._threads.submit(self._server.call, path, body)


def opened_group(port: int) -> Any:
    """Rank 0 of a group beside torch's default one, on a store with its name as the prefix, as SGLang's trainers do."""
    timeout = timedelta(seconds=DEADLINE_S)
    store, rank, size = next(distributed_c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=timeout))
    prefixed = distributed_c10d.PrefixStore(GROUP, store)
    group, _ = distributed_c10d._new_process_group_helper(
        size, rank, [], distributed_c10d.Backend("gloo"), prefixed, group_name=GROUP, timeout=timeout
    )
    distributed_c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}
    return group


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def train(server: Server, checkpoint: Path, rounds: range, options: argparse.Namespace) -> None:
    """Train from `checkpoint`, which has the weights of the last complete update; prints one line per round."""
    trainer, group = Trainer(checkpoint, options.rate), WeightGroup(server)
    for number in rounds:
        prompts = [list(f"{number}.{i}: ".encode()) for i in range(BATCH)]
        answers = server.generate(prompts, temperature=1.0)
        reward = trainer.step([Rollout(*pair) for pair in zip(prompts, answers, strict=True)])
        before = server.fingerprint() if number == options.kill else {}
        server.call("/pause_generation", {})
        if before:
            group.send(trainer.weights(), number + 1, stop_after=1)
            report(half_sent=number, before=before)
            signal.pause()  # until it is killed
        group.send(trainer.weights(), number + 1)
        server.call("/continue_generation", {})
        trainer.policy.save_pretrained(checkpoint)
        report(round=number, reward=reward)
    group.close()


def report(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


# -- the run ----------------------------------------------------------------------------------------------------------


def run(server: Server, checkpoint: Path, options: argparse.Namespace) -> list[float]:
    """The rewards of all rounds, by one trainer process or, if the first one is killed, by two."""
    rewards: list[float] = []
    for event in trained(server, checkpoint, 0, options):
        if "half_sent" in event:
            verify_old_weights(server, event["before"])
            break
        rewards.append(noted(event))
    if len(rewards) < options.rounds:
        rest = argparse.Namespace(**vars(options) | {"kill": None})
        rewards += [noted(event) for event in trained(server, checkpoint, len(rewards), rest)]
    return rewards


def noted(event: dict[str, Any]) -> float:
    if event["round"] % 4 == 0:
        print(f"{event['round']:>5} {event['reward']:>7.3f}", flush=True)
    return float(event["reward"])


def trained(server: Server, checkpoint: Path, first: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The lines of a trainer process, which is killed when half of an update is sent."""
    command = [sys.executable, __file__, "--trainer", str(checkpoint), "--first", str(first), "--url", server.url]
    command += ["--rounds", str(options.rounds), "--rate", str(options.rate)]
    command += [] if options.kill is None else ["--kill", str(options.kill)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            event = json.loads(line)
            if "half_sent" in event:
                process.kill()
                process.wait(DEADLINE_S)
                print(f"round {event['half_sent']}: the trainer is killed between two buckets")
            yield event
        if status := process.wait(DEADLINE_S):
            raise SystemExit(f"the trainer has ended with {status}")
    finally:
        process.kill()
        process.communicate()


def verify_old_weights(server: Server, before: dict[str, Any]) -> None:
    """Resume the server that the killed trainer has left paused. The first call reports that the update is dropped."""
    try:
        server.call("/continue_generation", {})
        raise SystemExit("the server has accepted half of an update")
    except Refused as dropped:
        print(dropped)
    server.call("/continue_generation", {})
    after = server.fingerprint()
    assert after == before, f"the weights have changed: {before} and {after}"
    print(f"the server answers as before, with version {after['version']}; a new trainer starts", flush=True)


def plot(rewards: list[float], killed: int | None, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    axes.plot(rewards)
    if killed is not None:
        axes.axvline(killed, color="tab:red", linestyle="--", label="trainer killed during the update")
        axes.legend(loc="lower right")
    axes.set(xlabel="round (one weight update each)", ylabel="reward", ylim=(0, 1))
    axes.set_title("REINFORCE over SGLang's group: share of lower-case letters")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--kill", type=int, metavar="ROUND", help="kill the trainer in the update of this round")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)  # run as the trainer process
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)  # the engine computes on this machine too
    if options.trainer is not None:
        torch.manual_seed(0)
        train(Server(options.url), options.trainer, range(options.first, options.rounds), options)
        return
    with tempfile.TemporaryDirectory(prefix="sglang-group-") as parent:
        checkpoint = tiny_model(Path(parent) / "policy")
        print("round  reward")
        with served(tiny_model(Path(parent) / "served")) as url:
            rewards = run(Server(url), checkpoint, options)
    if options.plot:
        plot(rewards, options.kill, options.plot)
    tenth = max(1, len(rewards) // 10)
    first, last = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
    print(json.dumps({"rounds": len(rewards), "first_reward": round(first, 3), "last_reward": round(last, 3)}))


if __name__ == "__main__":
    main()
