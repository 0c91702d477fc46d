"""New weights under a running load, on a real engine. Numbers cite docs/lifecycle.md."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path

import pytest
import torch

from headgate.device.weights import resources
from headgate.device.weights.broadcast import BroadcastWeights
from headgate.device.weights.loading import SafetensorsFolder, load_weights
from headgate.errors import RequestError, SourceLost
from headgate.models import build_model, read_spec
from headgate.protocol.command import BroadcastSource, Denied, EngineState, FileSource, Pause, Resume, UpdateWeights
from headgate.testing.tiny import tiny_model
from headgate.weights import publish, send_weights
from tests.ports import own_port
from tests.updates.driver import PROMPTS, TOKENS, Driver, driving, trainer

NORM = "model.layers.1.input_layernorm.weight"
IDS = tuple(PROMPTS)


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("old"), tokenizer=False)


@pytest.fixture(scope="module")
def new(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("new"), seed=1, tokenizer=False)


@pytest.fixture(scope="module")
def undisturbed(old) -> dict[int, list[int]]:
    """The answers of the old weights."""
    return answers_of(old)


@pytest.fixture(scope="module")
def renewed(new) -> dict[int, list[int]]:
    """The answers of the new weights."""
    return answers_of(new)


def answers_of(folder: Path) -> dict[int, list[int]]:
    with driving(folder) as driver:
        driver.submit(*IDS)
        return driver.finish()


def frozen(driver: Driver) -> Driver:
    """Return a frozen engine: four sequences hold KV of the old weights, and two wait."""
    driver.submit(*IDS)
    driver.turn_until_some_run()
    state = driver.call(Pause("freeze"))
    assert isinstance(state, EngineState) and state.state == "paused" and len(driver.engine.scheduler.running) == 4
    return driver


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(SafetensorsFolder(folder))


def without_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[NORM]


def wrong_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NORM] = torch.zeros(65)


def wrong_dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NORM] = torch.zeros(64, dtype=torch.int8)


def one_too_many(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.7.input_layernorm.weight"] = torch.zeros(64)


# -- files ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (without_norm, f"lacks tensor {NORM}"),
        (wrong_shape, f"tensor {NORM} has shape [65]; the model expects [64]"),
        (wrong_dtype, f"tensor {NORM} has dtype int8"),
        (one_too_many, "no place for tensor model.layers.7.input_layernorm.weight"),
    ],
)
def test_25_tensors_that_do_not_fit_are_named_and_the_old_weights_keep_serving(old, new, undisturbed, spoil, reason):
    tensors = tensors_of(new)
    spoil(tensors)
    with driving(old) as driver, publish(tensors) as files:
        denied = frozen(driver).call(UpdateWeights(files))
        assert isinstance(denied, Denied) and (denied.status, denied.code) == (400, "bad_weights")
        assert reason in denied.message and "nothing has changed" in denied.message
        driver.call(Resume())
        assert driver.finish() == undisturbed


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def garbage_header(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"data_offsets"', b'"data_onsets!"', 1))


def one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (cut_short, "but tensor model.norm.weight ends at"),
        (garbage_header, "describes tensor model.embed_tokens.weight in an unknown format"),
        (one_bit, "has SHA-256"),
        (Path.unlink, "cannot be opened: No such file"),
    ],
)
def test_25_a_broken_file_is_named_and_the_old_weights_keep_serving(old, new, undisturbed, spoil, reason):
    with driving(old) as driver, publish(tensors_of(new), checksum=True) as files:
        spoil(Path(files.path))
        denied = frozen(driver).call(UpdateWeights(files))
        assert isinstance(denied, Denied) and denied.code in ("bad_weights", "source_lost")
        assert files.path in denied.message and reason in denied.message
        driver.call(Resume())
        assert driver.finish() == undisturbed
        Path(files.path).unlink(missing_ok=True)
        assert not open_files_of(files)


def test_25_a_file_cut_short_while_it_is_read_quarantines_the_engine_until_a_full_update(
    old, new, undisturbed, monkeypatch
):
    read = resources.SafetensorsFiles.__iter__

    def read_and_cut(self):
        for name, tensor in read(self):
            yield name, tensor
            os.truncate(self.files[0], 10_000)

    with driving(old) as driver, publish(tensors_of(new)) as files:
        with monkeypatch.context() as patch:
            patch.setattr(resources.SafetensorsFiles, "__iter__", read_and_cut)
            denied = frozen(driver).call(UpdateWeights(files))
        assert isinstance(denied, Denied) and denied.code == "quarantined"
        assert "was cut short while tensor model.layers.0.self_attn.q_proj.weight was read" in denied.message
        refused = driver.call(Resume())
        assert isinstance(refused, Denied) and refused.status == 409
        state = driver.call(UpdateWeights(FileSource(str(old))))
        assert isinstance(state, EngineState) and state.state == "paused"
        driver.call(Resume())
        assert driver.finish() == undisturbed


def test_25_27_same_weights_with_recompute_change_nothing_but_the_version(old, undisturbed):
    with driving(old) as driver:
        state = frozen(driver).call(UpdateWeights(FileSource(str(old))))
        assert isinstance(state, EngineState) and state.version == 1 and not driver.engine.scheduler.running
        before = {id: len(tokens) for id, tokens in driver.tokens.items()}
        driver.call(Resume())
        assert driver.finish() == undisturbed
        for id, versions in driver.versions.items():
            assert versions == [0] * before.get(id, 0) + [1] * (TOKENS - before.get(id, 0))


def test_25_new_weights_from_shared_memory_answer_like_their_checkpoint(old, new, renewed):
    with driving(old) as driver:
        driver.call(Pause("abort"))
        with publish(tensors_of(new), version=5, checksum=True) as files:
            assert files.path.startswith("/dev/shm/")
            state = driver.call(UpdateWeights(files, version=5))
        assert isinstance(state, EngineState) and state.version == 5 and not open_files_of(files)
        driver.call(Resume())
        driver.submit(*IDS)
        assert driver.finish() == renewed


def open_files_of(files: FileSource) -> list[str]:
    """Descriptors of this process for a removed file, which uses memory as long as there are any."""
    assert not Path(files.path).exists()
    opened = {each: os.readlink(each) for each in map(str, Path("/proc/self/fd").iterdir()) if os.path.islink(each)}
    return [each for each, target in opened.items() if files.path in target]


def test_25_published_files_may_be_removed_once_they_are_open(old, new, renewed, monkeypatch):
    with driving(old) as driver, publish(tensors_of(new)) as files:
        verify = resources.SafetensorsFiles.metadata

        def metadata(self):
            found = verify(self)
            Path(files.path).unlink()
            return found

        monkeypatch.setattr(resources.SafetensorsFiles, "metadata", metadata)
        driver.call(Pause("abort"))
        state = driver.call(UpdateWeights(files))
        assert isinstance(state, EngineState)
        driver.call(Resume())
        driver.submit(*IDS)
        assert driver.finish() == renewed


def test_26_with_keep_running_answers_continue_with_their_kv_and_new_ones_do_not_reuse_it(
    old, new, undisturbed, renewed
):
    with driving(old) as driver:
        state = frozen(driver).call(UpdateWeights(FileSource(str(new)), recompute=False))
        assert isinstance(state, EngineState) and len(driver.engine.scheduler.running) == 4
        before = {id: list(tokens) for id, tokens in driver.tokens.items()}
        driver.call(Resume())
        after = driver.finish()
        assert all(after[id][: len(tokens)] == tokens for id, tokens in before.items())
        assert all(len(tokens) == TOKENS for tokens in after.values()) and after[1] != undisturbed[1]
        assert {id: after[id] for id in (5, 6)} == {id: renewed[id] for id in (5, 6)}
        driver.tokens.clear()
        driver.submit(*IDS)
        assert driver.finish() == renewed


def test_26_a_version_that_was_used_before_is_refused(old, new):
    with driving(old) as driver:
        driver.call(Pause("abort"))
        driver.call(UpdateWeights(FileSource(str(old)), version=4))
        denied = driver.call(UpdateWeights(FileSource(str(new)), version=4))
        assert isinstance(denied, Denied) and denied.code == "stale_version"


def test_an_update_may_give_checksums_of_its_files(old, new):
    digest = hashlib.sha256((new / "model.safetensors").read_bytes()).hexdigest()
    with driving(old) as driver:
        driver.call(Pause("abort"))
        state = driver.call(UpdateWeights(FileSource(str(new), {"model.safetensors": digest})))
        assert isinstance(state, EngineState)
        denied = driver.call(UpdateWeights(FileSource(str(new), {"model-2.safetensors": digest})))
        assert isinstance(denied, Denied) and "no such file" in denied.message


# -- a group --------------------------------------------------------------------------


def address() -> str:
    return f"tcp://127.0.0.1:{own_port()}"


def test_25_weights_from_a_trainer_process_answer_like_their_checkpoint(old, new, renewed):
    place = address()
    with driving(old) as driver, trainer(new, place) as process:
        driver.call(Pause("abort"))
        state = driver.call(UpdateWeights(BroadcastSource(place, 2, timeout_s=60)))
        assert isinstance(state, EngineState) and state.version == 1
        assert process.communicate(timeout=60)[0] == "sent\n"
        driver.call(Resume())
        driver.submit(*IDS)
        assert driver.finish() == renewed


@pytest.mark.parametrize(("room", "code"), [(2**40, "source_lost"), (0, "quarantined")])
def test_25_a_trainer_killed_in_the_middle_leaves_a_serving_or_a_quarantined_engine(
    old, new, undisturbed, monkeypatch, room, code
):
    monkeypatch.setattr(resources, "free_bytes", lambda _: room)
    place = address()
    with driving(old) as driver, trainer(new, place, dies="in the middle") as process:
        number = frozen(driver).begin(UpdateWeights(BroadcastSource(place, 2, timeout_s=60)))
        assert process.stdout is not None and process.stdout.readline() == "half\n"
        process.kill()
        denied = driver.answer(number)
        assert isinstance(denied, Denied) and denied.code == code
        assert driver.engine.loop.control.state == ("paused" if room else "quarantined")
        if not room:
            state = driver.call(UpdateWeights(FileSource(str(old))))
            assert isinstance(state, EngineState)
        driver.call(Resume())
        assert driver.finish() == undisturbed


def test_25_an_update_from_an_absent_trainer_ends_at_the_timeout(old, undisturbed):
    with driving(old) as driver:
        denied = frozen(driver).call(UpdateWeights(BroadcastSource(address(), 2, timeout_s=0.5)))
        assert isinstance(denied, Denied) and (denied.status, denied.code) == (502, "source_lost")
        driver.call(Resume())
        assert driver.finish() == undisturbed


def test_25_an_engine_that_refuses_reports_the_reason_to_the_trainer_and_no_rank_hangs(old, undisturbed, tmp_path):
    wide = tiny_model(tmp_path, seed=1, tokenizer=False, intermediate_size=128)
    place = address()
    with driving(old) as driver, trainer(wide, place) as process:
        denied = frozen(driver).call(UpdateWeights(BroadcastSource(place, 2, timeout_s=60)))
        assert isinstance(denied, Denied) and denied.code == "bad_weights"
        reason = "tensor model.layers.0.mlp.gate_proj.weight has shape [128, 64]; the model expects [96, 64]"
        assert reason in denied.message
        assert process.communicate(timeout=60)[0] == f"RequestError the weights are refused: rank 1: {reason}\n"
        driver.call(Resume())
        assert driver.finish() == undisturbed


class Joined(threading.Thread):
    """An engine's side of an exchange, in a thread; `outcome` is None or what it raised."""

    def __init__(self, folder: Path, group: BroadcastSource) -> None:
        super().__init__()
        self.model = build_model(read_spec(folder), backend="torch")
        load_weights(self.model, SafetensorsFolder(folder))
        self.group, self.outcome = group, None
        self.start()

    def run(self) -> None:
        try:
            load_weights(self.model, BroadcastWeights(self.group, lambda _: 2**40))
        except Exception as error:
            self.outcome = error


def test_one_engine_that_refuses_keeps_all_others_from_changing(old, new, tmp_path):
    wide = tiny_model(tmp_path, tokenizer=False, intermediate_size=128)
    place = address()
    fits, refuses = (Joined(folder, BroadcastSource(place, 3, rank, 30)) for rank, folder in ((1, old), (2, wide)))
    before = fits.model.unembedding.matrix.data.clone()
    with pytest.raises(RequestError, match=r"rank 2: tensor model\.layers\.0\.mlp\.gate_proj\.weight has shape"):
        send_weights(tensors_of(new), place, 3, timeout_s=60)
    fits.join(60)
    refuses.join(60)
    assert isinstance(fits.outcome, SourceLost) and "rank 2 refuses: tensor" in str(fits.outcome)
    assert torch.equal(fits.model.unembedding.matrix.data, before)


def test_several_engines_receive_in_small_buckets_beside_a_default_group(old, new):
    place = address()
    torch.distributed.init_process_group("gloo", init_method=address(), rank=0, world_size=1)
    try:
        engines = [Joined(old, BroadcastSource(place, 3, rank, 30)) for rank in (1, 2)]
        send_weights(tensors_of(new), place, 3, timeout_s=60, bucket_bytes=10_000)
        for engine in engines:
            engine.join(60)
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()
    expected = build_model(read_spec(new), backend="torch")
    load_weights(expected, SafetensorsFolder(new))
    for engine in engines:
        assert engine.outcome is None
        assert torch.equal(engine.model.unembedding.matrix.data, expected.unembedding.matrix.data)
        assert torch.equal(engine.model.norm.weight, expected.norm.weight)


def test_published_files_are_readable_by_safetensors(new, tmp_path):
    from safetensors.torch import load_file

    tensors = {"a": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(), "b": torch.ones(()), "c": torch.zeros(0, 2)}
    with publish(tensors, tmp_path) as files:
        found = load_file(files.path)
        assert json.loads(Path(files.path).read_bytes()[8:300].partition(b"}}")[0] + b"}}").keys() == tensors.keys()
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
