"""A policy-gradient loop on a server: `python examples/rl_loop.py`, half a minute on two cores.

The policy is a tiny Llama with random weights; its reward is the share of its tokens that are lower-case letters. Each
round: ask for a batch of samples; when most are done, abort the tail; pause; take one REINFORCE step in plain PyTorch;
hand the new weights over through shared memory; resume. A sample that was cut goes on in the next round from its own
tokens, under the new weights: the last two columns show how many samples mix weight versions, and the tokens per version.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from headgate.client import AsyncFleet, Sample
from headgate.testing.tiny import tiny_model
from headgate.weights import publish

LENGTHS = (24, 32, 40, 192)  # tokens of a sample; the last kind is the tail
BATCH = 24
ENOUGH = 0.75  # of a batch; the rest is aborted and goes on in the next round


# -- the task ---------------------------------------------------------------------------------------------------------


def targets(vocabulary: int) -> torch.Tensor:
    """1 for the tokens that are wanted: lower-case letters. The tiny tokenizer has one token per byte."""
    from tokenizers import pre_tokenizers

    wanted = torch.zeros(vocabulary)
    for token, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())):
        wanted[token] = float("a" <= char <= "z")
    return wanted


# -- the trainer ------------------------------------------------------------------------------------------------------


class Trainer:
    """REINFORCE: make a token likelier by how much better than usual it was."""

    def __init__(self, folder: Path, rate: float) -> None:
        self.policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.wanted = targets(self.policy.config.vocab_size)
        self._optimizer = torch.optim.Adam(self.policy.parameters(), lr=rate)

    def step(self, samples: list[Sample]) -> float:
        """Learn from these; returns their mean reward."""
        ids, answered = padded(samples)
        rewards = self.wanted[ids[:, 1:]] * answered
        mean = float(rewards.sum() / answered.sum())
        logits = self.policy(ids[:, :-1]).logits
        chosen = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[:, :, 0]
        loss = -(chosen * (rewards - mean) * answered).sum() / answered.sum()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self._optimizer.step()
        return mean

    def weights(self) -> dict[str, torch.Tensor]:
        """Under the names of the checkpoint, in which the output layer is the embedding."""
        return {name: w for name, w in self.policy.state_dict().items() if name != "lm_head.weight"}


def padded(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts and answers as rows of one length, and which positions (but the first) are answers."""
    rows = [sample.prompt_token_ids + sample.token_ids for sample in samples]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    answered = torch.zeros(ids.shape)
    for i, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        answered[i, len(sample.prompt_token_ids) : len(row)] = 1
    return ids, answered[:, 1:]


# -- the rollouts -----------------------------------------------------------------------------------------------------


@dataclass
class Rollouts:
    """Asks for samples and keeps those that were cut for the next round."""

    fleet: AsyncFleet
    seed: int
    cut: list[Sample] = field(default_factory=list)

    async def round(self, number: int) -> list[Sample]:
        tags = {"round": str(number)}
        choose = random.Random(f"{self.seed}/{number}")
        fresh = [f"{number}.{i}: " for i in range(BATCH - len(self.cut))]
        asked = [asyncio.create_task(self._go_on(sample, tags)) for sample in self.cut]
        asked += [asyncio.create_task(self._begin(prompt, tags, choose)) for prompt in fresh]
        waiting = set(asked)
        while len(waiting) > BATCH * (1 - ENOUGH):
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await self.fleet.abort(tags=tags)
        samples = [await task for task in asked]
        self.cut = [sample for sample in samples if sample.cut]
        return [sample for sample in samples if not sample.cut]

    async def _begin(self, prompt: str, tags: dict[str, str], choose: random.Random) -> Sample:
        length = choose.choice(LENGTHS)
        return await self.fleet.generate(prompt, tags=tags, max_tokens=length, ignore_eos=True, temperature=1.0)

    async def _go_on(self, sample: Sample, tags: dict[str, str]) -> Sample:
        length = max(LENGTHS)
        return await self.fleet.generate(after=sample, tags=tags, max_tokens=length, ignore_eos=True, temperature=1.0)


def made_by(samples: list[Sample]) -> str:
    counts = Counter(version for sample in samples for version in sample.weight_versions)
    return " ".join(f"v{version}:{count}" for version, count in sorted(counts.items()))


# -- the loop ---------------------------------------------------------------------------------------------------------


async def learn(url: str, trainer: Trainer, rounds: int, seed: int) -> list[float]:
    fleet = AsyncFleet(url)
    rollouts = Rollouts(fleet, seed)
    history = []
    print(f"{'round':>5} {'reward':>7} {'done':>5} {'cut':>4} {'mixed':>6}  tokens by weight version")
    for number in range(rounds):
        samples = await rollouts.round(number)
        await fleet.pause("abort")
        reward = trainer.step(samples)
        history.append(reward)
        with publish(trainer.weights(), version=number + 1) as files:
            await fleet.update_weights(files, number + 1)
        await fleet.resume()
        mixed = sum(len(set(sample.weight_versions)) > 1 for sample in samples)
        if number % 4 == 0 or number == rounds - 1:
            counts = f"{len(samples):>5} {len(rollouts.cut):>4} {mixed:>6}"
            print(f"{number:>5} {reward:>7.3f} {counts}  {made_by(samples)}", flush=True)
    last = await fleet.generate("and now: ", max_tokens=40, ignore_eos=True, temperature=1.0)
    print(f"\nthe policy now says: {last.text!r}")
    return history


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A server of our own on a free port; its address."""
    command = [sys.executable, "-m", "headgate.cli", "serve", str(folder), "--port", "0", "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"listening +(http://\S+)", line):
                yield found[1]
                return
        raise SystemExit("the server did not start; it has said why")
    finally:
        process.terminate()
        process.communicate()


def plot(history: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    axes.plot(history)
    axes.set(xlabel="round (= weight version)", ylabel="reward", title="share of lower-case letters", ylim=(0, 1))
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"plot: {path}")


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a server of the tiny model; default: one is started")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--rate", type=float, default=7e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("rl_loop.png"))
    options = parser.parse_args(arguments)
    disable_progress_bar()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the engine computes on this machine too
    with tempfile.TemporaryDirectory(prefix="rl-loop-") as parent:
        folder = tiny_model(Path(parent) / "policy", seed=options.seed)
        trainer = Trainer(folder, options.rate)
        with served(folder) as url:
            history = asyncio.run(learn(options.url or url, trainer, options.rounds, options.seed))
    plot(history, options.plot)
    return history


if __name__ == "__main__":
    main()
