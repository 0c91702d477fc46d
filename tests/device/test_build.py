"""A device built from a model folder: its sizes, and that it serves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headgate.config import EngineConfig
from headgate.contract.sampling import SamplingParams
from headgate.device import build as build_module
from headgate.device.build import Device, build_device, kv_windows
from headgate.device.memory import current
from headgate.errors import OutOfMemory, RequestError
from headgate.models import read_spec
from headgate.testing.tiny import tiny_model
from tests.device.fakes import Text, step_plan
from tests.device.test_executor import tokens_of
from tests.device.test_runner import decode, prefill

SAMPLED = SamplingParams(seed=11)


def tiny_worker(folder: Path, **config: Any) -> Device:
    tiny_model(folder, tokenizer=False)
    return build_device(folder, EngineConfig(device="cpu", max_running=4, block_size=16, **config))


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_a_device_gives_the_same_tokens_from_cached_and_from_recomputed_kv(tmp_path: Path, backend: str):
    executor = tiny_worker(tmp_path, max_context=40, backend=backend).executor
    one = Text(0, [5, 6, 7, 8, 9], SAMPLED, blocks=[0, 1, 2], block_size=16)
    steps = [executor.launch(prefill(0, [one])), *(executor.launch(decode(i, [one])) for i in range(1, 20))]
    tokens = [token for (token,) in tokens_of(*steps)]
    again = Text(1, one.prompt, SAMPLED, blocks=[5, 4], block_size=16)
    join = again.join(generated=tokens[:-1])
    whole = executor.launch(step_plan(20, [again.advance(len(join.tokens), True)], joins=(join,)))
    assert tokens_of(whole) == [tokens[-1:]]
    executor.close()


def test_a_device_is_built_on_its_own_gpu_and_the_callers_gpu_stays_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Graphs are captured on the current GPU, not on the one where the tensors are."""
    assert getattr(current(torch.device("cuda", 1)), "idx", None) == 1
    seen: list[str] = []

    @contextmanager
    def noted(device: torch.device) -> Iterator[None]:
        seen.append(f"on {device}")
        yield
        seen.append("left")

    def build_runner(*arguments: Any) -> Any:
        seen.append("built")
        return real(*arguments)

    real = build_module.build_runner
    monkeypatch.setattr(build_module, "current", noted)
    monkeypatch.setattr(build_module, "build_runner", build_runner)
    tiny_worker(tmp_path, max_context=40).executor.close()
    assert seen == ["on cpu", "built", "left"]


def test_kv_is_no_larger_than_the_running_sequences_can_use(tmp_path: Path):
    worker = tiny_worker(tmp_path, max_context=40)
    assert (worker.num_blocks, worker.max_context) == (4 * 3, 40)
    worker.executor.close()


def test_a_context_longer_than_the_models_is_refused(tmp_path: Path):
    with pytest.raises(RequestError, match="max_context is 1000000000; this model takes at most"):
        tiny_worker(tmp_path, max_context=10**9, kv_blocks=10)


def test_too_few_blocks_for_the_configured_context_raise_an_error_with_advice(tmp_path: Path):
    with pytest.raises(OutOfMemory, match="lower max_context, or raise kv_blocks or memory_fraction"):
        tiny_worker(tmp_path, max_context=40, kv_blocks=2)


def test_too_little_memory_for_the_configured_context_raises_an_error_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(build_module, "free_bytes", lambda _device: 1000)
    with pytest.raises(OutOfMemory, match="lower max_context, or raise kv_blocks or memory_fraction"):
        tiny_worker(tmp_path, max_context=40)


def test_a_group_whose_blocks_keep_experts_gives_none_back(tmp_path: Path):
    windows = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0, "num_hidden_layers": 2}
    spec = read_spec(tiny_model(tmp_path, "qwen3", tokenizer=False, **windows))
    assert kv_windows(spec, EngineConfig()) == (7,)
    assert kv_windows(spec, EngineConfig(routed_experts=True)) == (None,)
