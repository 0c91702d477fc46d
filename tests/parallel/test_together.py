"""Engines of several ranks, which are threads here: answers, weights and memory are those of one."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from headgate import LLM, SamplingParams
from headgate.config import EngineConfig
from headgate.device import sleeping_memory as sleep_module
from headgate.device.build import build_device
from headgate.device.tensor_parallel import parallelism
from headgate.device.tensor_parallel.executors import AgreedWeights, RunStep
from headgate.device.tensor_parallel.parallelism import UpdatedWeights
from headgate.device.weights.loading import SafetensorsFolder
from headgate.errors import SourceLost
from headgate.protocol.command import (
    TAGS,
    BroadcastSource,
    Denied,
    EngineState,
    FileSource,
    Pause,
    Resume,
    SharedMemorySource,
    Sleep,
    UpdateWeights,
    Wake,
)
from headgate.testing.tiny import tiny_model
from headgate.text.constraints import json_schema
from tests.parallel.threads import BACKENDS, ThreadFollowers
from tests.test_equality import CROWDED, answers, prompts, varied
from tests.test_structured import PERSON
from tests.updates.driver import Driver, driving
from tests.updates.test_updates import IDS, answers_of, frozen


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    monkeypatch.setattr(parallelism, "Followers", ThreadFollowers)


GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("other"), "qwen3", seed=1)


@pytest.fixture(scope="module")
def undisturbed(folder) -> dict[int, list[int]]:
    return answers_of(folder)


@pytest.fixture(scope="module")
def renewed(other) -> dict[int, list[int]]:
    return answers_of(other)


def asked_and_params() -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy, every kind of sampling, and grammars."""
    params = [GREEDY] * 2 + [varied(i, max_tokens=16) for i in range(8)]
    params += [SamplingParams(seed=i, max_tokens=24, grammar=json_schema(PERSON)) for i in range(2)]
    return prompts(len(params), seed=2), params


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_answer_as_one_does_batched_preempted_and_cached(folder, backend):
    asked, params = asked_and_params()
    with LLM(folder, dtype="float32", backend=backend, **CROWDED) as llm:
        alone = answers(llm, asked, params)
    with LLM(folder, dtype="float32", backend=backend, tensor_parallel=2, **CROWDED) as llm:
        assert answers(llm, asked, params) == alone
        assert answers(llm, asked[:3], params[:3]) == alone[:3], "prompts cached"
        llm.engine.scheduler.check()
        counters = llm.engine.scheduler.counters
        assert counters.cached_tokens > 0 and counters.preemptions > 0
        assert llm.engine.info.ranks == 2


def test_scores_of_prompts_and_answers_are_those_of_one_rank(folder):
    params = SamplingParams(seed=4, max_tokens=8, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    scores = []
    for ranks in (1, 2):
        with LLM(folder, dtype="float32", tensor_parallel=ranks, max_running=4) as llm:
            (answer,) = llm.generate([list(range(40))], params, progress=False)
            scores.append([*answer.prompt_logprobs[1:], *answer.logprobs])
    for one, two in zip(*scores, strict=True):
        assert one.top_ids == two.top_ids and one.token == pytest.approx(two.token, abs=1e-4)


def test_two_ranks_return_the_experts_that_one_does(tmp_path):
    mixture = tiny_model(tmp_path, "qwen3_moe")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, return_routed_experts=True)
    found = []
    for ranks in (1, 2):
        with LLM(mixture, dtype="float32", tensor_parallel=ranks, max_running=4, routed_experts=True) as llm:
            (answer,) = llm.generate([list(range(40))], params, progress=False)
            found.append(answer.routed_experts.tolist())
    assert found[0] == found[1] and len(found[0]) == 47


def test_followers_receive_plans_without_the_fields_that_only_rank_0_needs(folder):
    """Only rank 0 draws: followers get no tokens except those of sequences that join, and return nothing."""
    with LLM(folder, dtype="float32", tensor_parallel=2, max_running=4) as llm:
        llm.generate([[1, 2, 3]], GREEDY, progress=False)
        followers = llm.engine.executor._send_order.__self__
        assert isinstance(followers, ThreadFollowers)
        steps = [order.plan for order in followers.orders if isinstance(order, RunStep)]
    assert len(steps) == 16 and [len(plan.joins) for plan in steps] == [1] + [0] * 15


# -- weights and memory ----------------------------------------------------------------


def test_25_an_update_by_path_changes_all_ranks(folder, other, renewed):
    with driving(folder, tensor_parallel=2) as driver:
        driver.call(Pause("abort"))
        state = driver.call(UpdateWeights(FileSource(str(other))))
        assert isinstance(state, EngineState) and state.version == 1
        driver.call(Resume())
        driver.submit(*IDS)
        assert driver.finish() == renewed


def test_25_files_that_one_rank_cannot_read_change_none(folder, other, undisturbed, monkeypatch, tmp_path):
    with driving(folder, tensor_parallel=2) as driver:
        driver.call(Pause("abort"))
        broken = tmp_path / "broken"
        shutil.copytree(other, broken)
        forget_on_rank_1(monkeypatch, broken)
        denied = driver.call(UpdateWeights(FileSource(str(broken))))
        assert isinstance(denied, Denied) and "rank 1: " in denied.message and "no weights" in denied.message
        assert driver.engine.loop.control.state == "paused"
        driver.call(Resume())
        driver.submit(*IDS)
        assert driver.finish() == undisturbed


def forget_on_rank_1(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Hide the files from rank 1, as if its machine did not have them."""
    opened = AgreedWeights._files

    def files(self):
        if self._ranks.rank == 1 and self.files.path == str(path):
            self.files = FileSource("/nowhere")
        return opened(self)

    monkeypatch.setattr(AgreedWeights, "_files", files)


def test_25_a_partial_load_on_one_rank_counts_as_partial_on_all(folder, other, renewed, monkeypatch):
    with driving(folder, tensor_parallel=2) as driver:
        driver.call(Pause("abort"))
        with monkeypatch.context() as broken:
            break_off_on_rank_1(broken)
            denied = driver.call(UpdateWeights(FileSource(str(other))))
        assert isinstance(denied, Denied) and denied.code == "quarantined" and "the disk is gone" in denied.message
        denied = driver.call(Resume())
        assert isinstance(denied, Denied) and denied.status == 409
        assert isinstance(driver.call(UpdateWeights(FileSource(str(other)))), EngineState)
        driver.call(Resume())
        driver.submit(*IDS)
        assert driver.finish() == renewed


def break_off_on_rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaking(SafetensorsFolder):
        def __iter__(self):
            yield next(super().__iter__())
            raise SourceLost("the disk is gone")

    opened = AgreedWeights._files

    def files(self):
        source = opened(self)
        if self._ranks.rank == 1 and not isinstance(source, Breaking):
            self._source = source = Breaking(self.files.path)
        return source

    monkeypatch.setattr(AgreedWeights, "_files", files)


def test_sources_that_reach_only_one_rank_are_refused_by_name(folder):
    sources = {
        "broadcasts to a group": BroadcastSource("tcp://127.0.0.1:1", 2),
        "shares its GPU memory": SharedMemorySource("", (), ()),
    }
    with driving(folder, tensor_parallel=2) as driver:
        driver.call(Pause("abort"))
        for kind, source in sources.items():
            denied = driver.call(UpdateWeights(source))
            assert isinstance(denied, Denied) and denied.status == 400
            assert f"this engine has 2 ranks, and a trainer that {kind} cannot reach them" in denied.message
            assert driver.engine.loop.control.state == "paused"


def test_frozen_answers_continue_after_all_ranks_have_slept(folder, undisturbed):
    with driving(folder, tensor_parallel=2) as driver:
        state = frozen(driver).call(Sleep(TAGS))
        assert isinstance(state, EngineState) and state.asleep == TAGS
        state = driver.call(Wake(TAGS))
        assert isinstance(state, EngineState) and state.asleep == ()
        driver.call(Resume())
        assert driver.finish() == undisturbed


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_a_rank_that_cannot_wake_keeps_all_asleep(folder, undisturbed, tag, monkeypatch):
    """The ranks can be woken later, when there is memory again."""
    with driving(folder, tensor_parallel=2) as driver:
        frozen(driver).call(Sleep((tag,)))
        with monkeypatch.context() as crowded:
            crowd_rank_1(crowded, driver)
            denied = driver.call(Wake((tag,)))
        assert isinstance(denied, Denied) and "rank 1: waking needs" in denied.message
        assert driver.engine.loop.control.asleep == (tag,)
        state = driver.call(Wake((tag,)))
        assert isinstance(state, EngineState) and state.asleep == ()
        driver.call(Resume())
        assert driver.finish() == undisturbed


def crowd_rank_1(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    """Make allocations fail on the device threads of all ranks except the first."""
    free, first = sleep_module.free_bytes, driver.engine.executor._thread

    def crowded(device):
        return free(device) if threading.current_thread() is first else 0

    monkeypatch.setattr(sleep_module, "free_bytes", crowded)


def test_55_weights_missing_on_one_rank_are_loaded_by_none(folder, other, monkeypatch, tmp_path, caplog):
    lacking = tmp_path / "lacking"
    shutil.copytree(other, lacking)
    config = EngineConfig(tensor_parallel=2, max_running=2, device="cpu")
    worker = build_device(folder, config, UpdatedWeights(FileSource(str(lacking)), 7))
    assert worker.version == 7
    worker.executor.close()
    forget_on_rank_1(monkeypatch, lacking)
    worker = build_device(folder, config, UpdatedWeights(FileSource(str(lacking)), 7))
    assert worker.version == 0 and "weights of version 7 cannot be loaded" in caplog.text
    worker.executor.close()


def test_33_kv_is_neither_served_nor_fetched(folder):
    """An engine of several ranks has a part of the KV on each, so export requests are refused with that reason."""
    with driving(folder, tensor_parallel=2, kv_listen="127.0.0.1:0") as driver:
        assert driver.engine.transport.address == ""
        assert not driver.engine.scheduler.limits.exports
