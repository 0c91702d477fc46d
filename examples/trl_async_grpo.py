"""TRL's AsyncGRPOTrainer against a Headgate server, on a CPU: `python examples/trl_async_grpo.py`, a few minutes.

The policy is a tiny Llama with random weights; its reward is the share of lower-case letters in its answer. TRL's
trainer and its rollout worker run unchanged. Two of their own hooks are used: `weight_transfer`, because TRL's default
sends over NCCL, and transformers' `AttentionInterface`, because TRL's packed attention calls a kernel that exists for
GPUs only. TRL requires that the vLLM package is installed; no vLLM server runs. TRL also looks up the name of the GPU to
report its utilisation; without CUDA that lookup raises, so this script answers it with "cpu".
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AttentionInterface, AutoTokenizer, PreTrainedTokenizerBase
from trl.chat_template_utils import qwen3_chat_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from headgate.client import Fleet
from headgate.integrations.trl import HeadgateWeightTransfer
from headgate.testing.tiny import tiny_model


def lower_case(completions: list[Any], **columns: Any) -> list[float]:
    """The share of lower-case letters. A function of the module, because TRL calls it in a spawned process."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [sum("a" <= char <= "z" for char in text) / max(len(text), 1) for text in texts]


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: None,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """What TRL's GPU kernel computes: the queries of each segment attend to the keys on its path, causally."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (x[0].index_select(1, tree_kv_index).repeat_interleave(groups, 0) for x in (key, value))
    rows = []
    q_ends, k_ends = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for q0, q1, k0, k1 in zip(q_ends, q_ends[1:], k_ends, k_ends[1:], strict=False):
        # Aligned at the end: the last query of a segment sees the whole path.
        allowed = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        segment = query[0, :, q0:q1], keys[:, k0:k1], values[:, k0:k1]
        rows.append(torch.nn.functional.scaled_dot_product_attention(*segment, attn_mask=allowed, scale=scaling))
    return torch.cat(rows, 1).transpose(0, 1).unsqueeze(0), None


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A server on a free port; its address."""
    # TRL asks for the model by the path that it was given, which is the name that vLLM serves it under.
    names = ["--served-name", str(folder), "--log-level", "warning"]
    command = [sys.executable, "-m", "headgate.cli", "serve", str(folder), "--port", "0", *names]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"listening +(http://\S+)", line):
                yield found[1]
                return
        raise SystemExit("the server did not start; its log has the reason")
    finally:
        process.terminate()
        process.communicate()


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    """With a chat template whose answers TRL can parse; the rollout worker applies it and sends token ids."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = qwen3_chat_template
    return tokenizer


def train(url: str, folder: Path, output: Path, options: argparse.Namespace) -> AsyncGRPOTrainer:
    prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{i}: "}] for i in range(64)]})
    arguments = AsyncGRPOConfig(
        output_dir=str(output),
        vllm_server_base_url=url,
        max_steps=options.steps,
        learning_rate=options.rate,
        per_device_train_batch_size=options.batch,
        num_generations=8,
        max_completion_length=24,
        token_budget=0,
        max_staleness=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        seed=options.seed,
    )
    trainer = AsyncGRPOTrainer(
        model=str(folder),
        reward_funcs=lower_case,
        args=arguments,
        train_dataset=prompts,
        processing_class=tokenizer_of(folder),
        weight_transfer=HeadgateWeightTransfer(url),
    )
    AttentionInterface.register(trainer.model.config._attn_implementation, packed_attention)
    trainer.train()
    return trainer


def rewards_of(trainer: AsyncGRPOTrainer) -> list[tuple[int, float]]:
    return [(each["step"], each["reward"]) for each in trainer.state.log_history if "reward" in each]


def plot(rewards: list[tuple[int, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    axes.plot(*zip(*rewards, strict=True))
    axes.set(xlabel="step (one weight update each)", ylabel="reward", ylim=(0, 1))
    axes.set_title("TRL AsyncGRPO on Headgate: share of lower-case letters")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the engine computes on this machine too
    if not torch.cuda.is_available():
        torch.cuda.get_device_name = lambda _: "cpu"  # type: ignore[assignment]
    with tempfile.TemporaryDirectory(prefix="trl-") as parent:
        folder = tiny_model(Path(parent) / "policy", seed=options.seed)
        with served(folder) as url:
            rewards = rewards_of(train(url, folder, Path(parent) / "output", options))
            version = Fleet(url).state().weight_version
    if options.plot:
        plot(rewards, options.plot)
    values = [value for _, value in rewards]
    tenth = max(1, len(values) // 10)
    first, last = sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth
    result = {"steps": options.steps, "weight_version": version, "first_reward": first, "last_reward": last}
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
