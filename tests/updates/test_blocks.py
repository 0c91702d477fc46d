"""An engine that keeps the weights of its GGUF file in blocks: updates, sleep, and the same tokens in any schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headgate import LLM
from headgate.device.weights.gguf import GGUFWeights
from headgate.layers.choice import available_backends
from headgate.layers.formats import Floating, GgufBlocks
from headgate.protocol.command import Denied, EngineState, FileSource, Resume, Sleep, UpdateWeights, Wake
from headgate.weights import publish
from tests.model_store.files import write_gguf
from tests.resume import resume
from tests.test_equality import CROWDED, ROOMY, answers, prompts, varied
from tests.updates.driver import Driver, driving
from tests.updates.test_updates import IDS, frozen

pytestmark = pytest.mark.skipif("cpu" not in available_backends(), reason="needs the compiled kernels")

QUERY = "model.layers.0.self_attn.q_proj.weight"


def file_of(folder: Path, kind: str, seed: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    return write_gguf(folder / f"{kind}-{seed}.gguf", kind=kind, seed=seed)


def answers_of(path: Path, **options: object) -> dict[int, list[int]]:
    with driving(path, **{"dtype": "auto"} | options) as driver:
        driver.submit(*IDS)
        return driver.finish()


def updated(driver: Driver, source: FileSource) -> dict[int, list[int]]:
    """The answers of an idle engine after an update."""
    state = frozen(driver).call(UpdateWeights(source))
    assert isinstance(state, EngineState), state
    driver.call(Resume())
    driver.finish()
    driver.tokens.clear()
    driver.submit(*IDS)
    return driver.finish()


def format_of(llm: LLM, name: str = QUERY) -> object:
    return dict(llm.engine.executor._runner.model.parameters())[name].format


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_trainers_numbers_become_the_blocks_that_the_engine_started_with(tmp_path, kind):
    """Rounding numbers that are exact in blocks gives these blocks, so that an update equals a start."""
    old, new = (file_of(tmp_path / "models", kind, seed) for seed in (0, 1))
    with driving(old, dtype="auto") as driver, publish(dict(GGUFWeights(new))) as files:
        found = updated(driver, files)
    assert found == answers_of(new) != answers_of(old)


def test_a_file_of_the_same_formats_can_be_loaded_into_a_running_engine(tmp_path):
    old, new = (file_of(tmp_path / "models", "Q4_K", seed) for seed in (0, 1))
    with driving(old, dtype="auto") as driver:
        assert updated(driver, FileSource(str(new))) == answers_of(new) != answers_of(old)


def test_25_numbers_that_cannot_become_blocks_are_refused_by_name_and_nothing_changes(tmp_path):
    old, new = (file_of(tmp_path / "models", "Q4_K", seed) for seed in (0, 1))
    with driving(old, dtype="auto") as driver, publish(dict(GGUFWeights(new))) as files:
        denied = frozen(driver).call(UpdateWeights(files))
        assert isinstance(denied, Denied) and (denied.status, denied.code) == (400, "bad_weights")
        assert "has dtype float32; this engine stores it as the Q4_K blocks of its GGUF file" in denied.message
        assert "nothing has changed" in denied.message and "such as bfloat16" in denied.message
        driver.call(Resume())
        assert driver.finish() == answers_of(old)


def test_an_engine_with_a_dtype_converts_its_file_and_takes_any_update(tmp_path):
    old, new = (file_of(tmp_path / "models", "Q4_K", seed) for seed in (0, 1))
    with LLM(old, dtype="float32") as llm:
        assert format_of(llm) == Floating(torch.float32)
    with LLM(old) as llm:
        assert format_of(llm) == GgufBlocks("Q4_K")
    with driving(old, dtype="float32") as driver, publish(dict(GGUFWeights(new))) as files:
        assert updated(driver, files) == answers_of(new, dtype="float32")


def test_blocks_are_read_again_after_a_sleep(tmp_path):
    path = file_of(tmp_path, "Q4_1")
    with driving(path, dtype="auto") as driver:
        frozen(driver).call(Sleep(("weights",)))
        state = driver.call(Wake(("weights",)))
        assert isinstance(state, EngineState) and state.asleep == ()
        driver.call(Resume())
        assert driver.finish() == answers_of(path)


def test_tokens_are_the_same_alone_in_a_batch_preempted_cached_and_resumed(tmp_path):
    path, asked, count = file_of(tmp_path, "Q4_1"), prompts(16, seed=1), 16
    params = [varied(i, max_tokens=count) for i in range(16)]
    with LLM(path, **ROOMY) as llm:
        assert format_of(llm) == GgufBlocks("Q4_1")
        alone = [answers(llm, [prompt], [each])[0] for prompt, each in zip(asked, params, strict=True)]
        llm.engine.scheduler.pool.flush()
        assert answers(llm, asked, params) == alone, "in a batch"
        assert answers(llm, asked, params) == alone, "with prefix hits"
        for split in range(1, count):
            resumed = resume(llm, asked[split], params[split], alone[split][:split])
            assert resumed == alone[split][split:], f"resumed after {split} tokens"
    with LLM(path, **CROWDED) as llm:
        assert answers(llm, asked, params) == alone, "preempted and recomputed in chunks"
        assert llm.engine.scheduler.counters.preemptions > 0
