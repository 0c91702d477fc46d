"""Sleep and wake on a real engine: memory is released, and answers are as before."""

from __future__ import annotations

import gc
import re
import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from headgate.device import sleeping_memory as sleep_module
from headgate.device.weights.loading import SafetensorsFolder
from headgate.errors import EngineDead, OutOfMemory
from headgate.protocol.command import Denied, EngineState, FileSource, Pause, Resume, Sleep, UpdateWeights, Wake
from headgate.testing.tiny import tiny_model
from headgate.weights import publish
from tests.updates.driver import PROMPTS, driving
from tests.updates.test_updates import IDS, answers_of, frozen, tensors_of

MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), tokenizer=False)


@pytest.fixture(scope="module")
def undisturbed(model) -> dict[int, list[int]]:
    return answers_of(model)


@pytest.mark.parametrize("tags", [("weights",), ("kv_cache",), ("weights", "kv_cache")])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_frozen_answers_continue_after_a_sleep_with_the_same_tokens(model, undisturbed, tags, backend):
    with driving(model, backend=backend) as driver:
        state = frozen(driver).call(Sleep(tags))
        assert isinstance(state, EngineState) and (state.state, state.asleep) == ("paused", tags)
        assert len(driver.engine.scheduler.running) == (0 if "kv_cache" in tags else 4)
        denied = driver.call(Resume())
        assert isinstance(denied, Denied) and (denied.status, denied.code) == (409, "asleep")
        state = driver.call(Wake(tags))
        assert isinstance(state, EngineState) and state.asleep == () and state.version == 0
        driver.call(Resume())
        assert driver.finish() == undisturbed


def test_39_waking_waits_until_the_memory_is_zeroed(monkeypatch):
    """Otherwise, zeros could overwrite KV that is fetched right after, because transfers do not wait for steps."""
    awaited = []
    monkeypatch.setattr(sleep_module, "finish_copies", awaited.append)
    cache = torch.ones(10)
    sleeper = sleep_module.Sleeper([cache])
    sleeper.give_back()
    assert not awaited
    sleeper.take_again()
    assert awaited == [cache.device] and not cache.any()


def test_sleep_returns_memory_to_the_system_and_wake_allocates_it_again(tmp_path):
    size = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "max_position_embeddings": 4096}
    folder = tiny_model(tmp_path, tokenizer=False, **size)
    weights = (folder / "model.safetensors").stat().st_size
    with driving(folder, max_context=4096, max_running=2) as driver:
        prompt = {9: tuple(i % 250 for i in range(2000))}
        kv = 2000 * 8192  # bytes: keys and values of 4 layers with 2 heads of 128 numbers
        driver.submit(9, prompts=prompt, tokens=4)
        before = dict(driver.finish())
        driver.call(Pause("abort"))
        awake = resident()
        driver.call(Sleep(("weights",)))
        assert awake - resident() > 0.95 * weights
        driver.call(Sleep(("kv_cache",)))
        asleep = resident()
        assert awake - asleep > 0.95 * (weights + kv)
        driver.call(Wake())
        driver.call(Resume())
        driver.tokens.clear()
        driver.submit(9, prompts=prompt, tokens=4)
        assert driver.finish() == before
        assert resident() - asleep > 0.9 * (weights + kv)


def resident() -> int:
    """Count resident memory page by page; with many processors, the kernel's totals are off by megabytes."""
    gc.collect()
    pages = re.findall(r"^(?:Rss|Swap): +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return sum(map(int, pages)) * 1024


def test_one_part_may_wake_before_the_other(model, undisturbed):
    with driving(model) as driver:
        frozen(driver).call(Sleep())
        state = driver.call(Wake(("kv_cache",)))
        assert isinstance(state, EngineState) and state.asleep == ("weights",)
        assert isinstance(driver.call(Resume()), Denied)
        state = driver.call(Wake(("weights",)))
        assert isinstance(state, EngineState) and state.asleep == ()
        driver.call(Resume())
        assert driver.finish() == undisturbed


def test_sleeping_and_waking_twice_is_as_once(model, undisturbed):
    with driving(model) as driver:
        frozen(driver)
        for command in (Sleep(), Sleep(), Wake(), Wake()):
            assert isinstance(driver.call(command), EngineState)
        driver.call(Resume())
        assert driver.finish() == undisturbed


def test_an_engine_that_is_not_paused_does_not_sleep(model):
    with driving(model) as driver:
        denied = driver.call(Sleep())
        assert isinstance(denied, Denied) and (denied.status, denied.code) == (409, "not_paused")


def test_a_drain_of_sleeping_answers_is_refused_and_an_abort_is_not(model):
    with driving(model) as driver:
        frozen(driver).call(Sleep())
        denied = driver.call(Pause("drain"))
        assert isinstance(denied, Denied) and denied.code == "asleep"
        state = driver.call(Pause("abort"))
        assert isinstance(state, EngineState) and set(state.ended) == set(IDS)


def test_weights_whose_source_is_gone_stay_asleep_until_an_update(model, tmp_path):
    other = tiny_model(tmp_path, seed=1, tokenizer=False)
    with driving(model) as driver:
        driver.call(Pause("abort"))
        with publish(tensors_of(other)) as files:
            driver.call(UpdateWeights(files))
        driver.call(Sleep())
        denied = driver.call(Wake())
        assert isinstance(denied, Denied) and denied.code == "source_lost" and files.path in denied.message
        state = driver.call(UpdateWeights(FileSource(str(other))))
        assert isinstance(state, EngineState) and state.asleep == ("kv_cache",)
        driver.call(Wake())
        driver.call(Resume())
        driver.submit(*IDS)
        assert driver.finish() == answers_of(other)


def test_a_replaced_file_is_not_loaded_as_the_old_weights(tmp_path):
    folder = tiny_model(tmp_path / "model", tokenizer=False)
    with driving(folder) as driver:
        driver.call(Pause("abort"))
        driver.call(Sleep(("weights",)))
        shutil.copytree(tiny_model(tmp_path / "other", seed=1, tokenizer=False), folder, dirs_exist_ok=True)
        denied = driver.call(Wake())
        assert isinstance(denied, Denied) and "has changed since it was loaded" in denied.message


def test_weights_that_do_not_fit_leave_sleeping_ones_asleep(model, undisturbed, tmp_path):
    wide = tiny_model(tmp_path, tokenizer=False, intermediate_size=128)
    with driving(model) as driver:
        frozen(driver).call(Sleep())
        assert isinstance(driver.call(UpdateWeights(FileSource(str(wide)))), Denied)
        assert driver.engine.executor.asleep == ("weights", "kv_cache")
        driver.call(Wake())
        driver.call(Resume())
        assert driver.finish() == undisturbed


def test_waking_without_enough_free_memory_is_refused(model, undisturbed, monkeypatch):
    with driving(model) as driver:
        frozen(driver).call(Sleep())
        with monkeypatch.context() as patch:
            patch.setattr(sleep_module, "free_bytes", lambda _: 1000)
            for command in (Wake(("kv_cache",)), Wake(("weights",)), UpdateWeights(FileSource(str(model)))):
                denied = driver.call(command)
                assert isinstance(denied, Denied) and (denied.status, denied.code) == (503, "out_of_memory")
        state = driver.call(Wake())
        assert isinstance(state, EngineState) and state.state == "paused"
        driver.call(Resume())
        assert driver.finish() == undisturbed


def test_25_a_sender_of_weights_is_notified_if_there_is_no_room(model, monkeypatch):
    class AwaitedSource(SafetensorsFolder):
        """A source that peers wait for, like a group."""

        objections: ClassVar[list[object]] = []

        def __enter__(self) -> AwaitedSource:
            return self

        def __exit__(self, kind: object, error: object, trace: object) -> None:
            self.objections.append(error)

    with driving(model) as driver:
        frozen(driver).call(Sleep(("weights",)))
        executor = driver.engine.executor
        with monkeypatch.context() as patch:
            patch.setattr(sleep_module, "free_bytes", lambda _: 1000)
            with pytest.raises(OutOfMemory):
                executor.load_weights(AwaitedSource(model)).result(20)
        assert [type(error) for error in AwaitedSource.objections] == [OutOfMemory]
        executor.load_weights(AwaitedSource(model)).result(20)
        assert executor.asleep == () and AwaitedSource.objections[1] is None


def test_a_step_on_sleeping_memory_is_an_error_not_a_wrong_token(model):
    with driving(model) as driver:
        driver.engine.executor.sleep(("weights",)).result(20)
        driver.submit(1, prompts=PROMPTS)
        driver.engine.loop._recorder.write = lambda *_: None
        with pytest.raises(EngineDead, match="weights went to sleep"):
            driver.finish()


@pytest.mark.gpu
def test_a_gpu_releases_its_memory_and_answers_as_before(tmp_path):
    import torch

    size = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
    folder = tiny_model(tmp_path, tokenizer=False, **size)
    weights = (folder / "model.safetensors").stat().st_size
    with driving(folder, device="cuda", deterministic=True) as driver:
        driver.submit(*IDS)
        undisturbed = dict(driver.finish())
        driver.tokens.clear()
        awake = torch.cuda.mem_get_info()[0]
        frozen(driver).call(Sleep())
        assert torch.cuda.mem_get_info()[0] - awake > 0.9 * weights
        driver.call(Wake())
        driver.call(Resume())
        assert driver.finish() == undisturbed
