"""Loading weights: invalid weights are refused before a byte is written, and loading takes little memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from headgate.device.weights.checksums import checksums
from headgate.device.weights.loading import SafetensorsFolder, TensorInfo, load_weights
from headgate.errors import BrokenCheckpoint, HalfWritten, NotAModel, SourceLost
from headgate.layers.backend import Matrix
from headgate.layers.choice import available_backends
from headgate.layers.formats import Fp8Rows
from headgate.layers.linear import Linear
from headgate.models import build_model, read_spec
from headgate.testing.tiny import tiny_config, tiny_model, tiny_tensors, write_shard

NORM = "model.layers.1.input_layernorm.weight"
UP = "model.layers.0.mlp.up_proj.weight"


class Given:
    """A source with the given tensors."""

    def __init__(self, tensors, promised=None):
        self.tensors = tensors
        self.promised = promised or tensors

    def metadata(self):
        return {name: TensorInfo(t.dtype, tuple(t.shape)) for name, t in self.promised.items()}

    def __iter__(self):
        return iter(self.tensors.items())


@pytest.fixture
def folder(tmp_path):
    return tiny_model(tmp_path, tokenizer=False)


@pytest.fixture
def model(folder):
    model = build_model(read_spec(folder), backend="torch")
    load_weights(model, SafetensorsFolder(folder))
    return model


def tensors_of(folder):
    return {name: tensor.clone() for name, tensor in SafetensorsFolder(folder)}


def refusal(model, source):
    """Return the error with which `source` is refused; check that nothing was written."""
    before = model.norm.weight.clone(), model.unembedding.matrix.data.clone()
    with pytest.raises(BrokenCheckpoint) as refused:
        load_weights(model, source)
    assert torch.equal(model.norm.weight, before[0])
    assert torch.equal(model.unembedding.matrix.data, before[1])
    return str(refused.value)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_folder_gives_the_tensors_that_were_written(tmp_path, dtype, shards):
    folder = tiny_model(tmp_path, dtype=dtype, shards=shards)
    source = SafetensorsFolder(folder)
    expected = tiny_tensors(tiny_config("llama", dtype), seed=0)
    found = dict(source)
    assert found.keys() == expected.keys() == source.metadata().keys()
    for name, tensor in found.items():
        assert source.metadata()[name] == TensorInfo(getattr(torch, dtype), tuple(tensor.shape))
        torch.testing.assert_close(tensor.float(), torch.from_numpy(expected[name]), rtol=8e-3, atol=1e-4)


def test_a_live_update_replaces_every_weight(tmp_path, model):
    other = tiny_model(tmp_path / "other", seed=1, tokenizer=False)
    load_weights(model, SafetensorsFolder(other))
    fresh = build_model(model.spec, backend="torch")
    load_weights(fresh, SafetensorsFolder(other))
    hidden = torch.randn(3, 64)
    assert torch.equal(model.logits(hidden), fresh.logits(hidden))
    for ours, theirs in zip(model.layers, fresh.layers, strict=True):
        assert torch.equal(ours.attention.qkv.matrix.data, theirs.attention.qkv.matrix.data)
        assert torch.equal(ours.mlp.gate_up(hidden), theirs.mlp.gate_up(hidden))


@pytest.mark.parametrize("changed", [NORM, UP, "model.embed_tokens.weight"])
def test_changing_one_number_changes_its_checksum_and_restoring_it_restores_the_checksum(folder, model, changed):
    tensors = tensors_of(folder)
    before = checksums(model)
    assert before.keys() == tensors.keys() - {"lm_head.weight"} or before.keys() == tensors.keys()
    kept = tensors[changed].clone()
    tensors[changed].view(-1)[-1] += 1
    load_weights(model, Given(tensors))
    after = checksums(model)
    differing = {name for name in before if after[name] != before[name]}
    fused = {UP, UP.replace("up_proj", "gate_proj")}  # one matrix
    assert differing == (fused if changed == UP else {changed})
    load_weights(model, Given(tensors | {changed: kept}))
    assert checksums(model) == before


def test_the_checksum_of_a_quantised_matrix_includes_its_scale(model):
    data, scale = torch.ones(2, 4, dtype=torch.uint8), torch.ones(2)
    matrix = Matrix(data, 2, 4, Fp8Rows(), scale)
    linear = Linear(model.backend, matrix, {"part": 2})
    (before,) = checksums(linear).values()
    scale *= 2  # the same numbers, twice as large
    (after,) = checksums(linear).values()
    assert before != after


def test_a_missing_tensor_is_named(model, folder):
    tensors = tensors_of(folder)
    del tensors[NORM]
    assert refusal(model, Given(tensors)) == f"the checkpoint lacks tensor {NORM}"
    del tensors[UP]
    assert refusal(model, Given(tensors)) == f"the checkpoint lacks tensor {UP} and 1 more"


def test_an_unexpected_tensor_is_named(model, folder):
    tensors = tensors_of(folder) | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    sentence = "the model has no place for tensor model.layers.0.self_attn.q_proj.bias of the checkpoint"
    assert refusal(model, Given(tensors)) == sentence


def test_harmless_extras_are_ignored(model, folder):
    extras = {
        "lm_head.weight": torch.zeros(260, 64),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
    }
    load_weights(model, Given(tensors_of(folder) | extras))
    assert not extras.keys() & dict(model.parameters()).keys()


def test_a_wrong_shape_is_stated_beside_the_right_one(model, folder):
    tensors = tensors_of(folder) | {UP: torch.zeros(97, 64)}
    assert refusal(model, Given(tensors)) == f"tensor {UP} has shape [97, 64]; the model expects [96, 64]"


def test_a_dtype_that_holds_no_weights_is_refused(model, folder):
    tensors = tensors_of(folder) | {UP: torch.zeros(96, 64, dtype=torch.int8)}
    sentence = f"tensor {UP} has dtype int8; it must be one of float32, bfloat16, float16, float64"
    assert refusal(model, Given(tensors)) == sentence


def test_a_source_that_lacks_a_declared_tensor_is_detected(model, folder):
    promised = tensors_of(folder)
    given = {name: tensor for name, tensor in promised.items() if name != NORM}
    with pytest.raises(HalfWritten, match=f"lacks tensor {NORM}"):
        load_weights(model, Given(given, promised))


def test_a_file_cut_short_is_named_before_anything_is_written(model, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    sentence = refusal(model, SafetensorsFolder(folder))
    assert f"{path} is cut short" in sentence
    assert "but tensor model.norm.weight ends at" in sentence


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is cut short or corrupt: 0 bytes cannot hold its header"),
        (b"abc", "is cut short or corrupt: 3 bytes cannot hold its header"),
        (b"\xff" * 100, "is cut short or corrupt: 100 bytes cannot hold its header"),
        ((8).to_bytes(8, "little") + b"not json", "has a corrupt header"),
        ((2).to_bytes(8, "little") + b"[]", "has a corrupt header: not a JSON object"),
    ],
)
def test_a_corrupt_file_is_named(model, folder, content, sentence):
    (folder / "model.safetensors").write_bytes(content)
    assert sentence in refusal(model, SafetensorsFolder(folder))


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}, "in an unknown format: KeyError('F4')"),
        ({"dtype": "F32", "shape": [2]}, "in an unknown format: KeyError('data_offsets')"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "bytes 0 to 8 for tensor x, [3] of float32"),
        (
            {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
            "in an unknown format: ValueError('-8 is not a size')",
        ),
        (7, "in an unknown format: TypeError"),
    ],
)
def test_an_invalid_header_is_refused(model, folder, entry, sentence):
    header = json.dumps({"x": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(8)
    (folder / "model.safetensors").write_bytes(content)
    assert sentence in refusal(model, SafetensorsFolder(folder))


def test_a_source_that_fails_before_it_gives_anything_leaves_the_model_alone(model):
    class Unreachable(Given):
        def __iter__(self):
            raise ConnectionError("no server")

    before = model.norm.weight.clone()
    with pytest.raises(SourceLost, match="the weights cannot be read: no server"):
        load_weights(model, Unreachable(tensors_of_model(model)))
    assert torch.equal(model.norm.weight, before)


def tensors_of_model(model):
    return {name: torch.zeros(parameter.shape) for name, parameter in model.parameters()}


def test_a_context_manager_source_is_entered_and_its_exit_receives_the_error(model):
    events = []

    class Entered(Given):
        def __enter__(self):
            events.append("enter")

        def __exit__(self, kind, error, where):
            events.append(str(error))

    tensors = tensors_of_model(model)
    load_weights(model, Entered(tensors))
    del tensors[NORM]
    with pytest.raises(BrokenCheckpoint):
        load_weights(model, Entered(tensors))
    assert events == ["enter", "None", "enter", f"the checkpoint lacks tensor {NORM}"]


def test_a_folder_without_weights_is_not_a_model(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(NotAModel, match=r"has no weights: neither model\.safetensors nor"):
        SafetensorsFolder(folder)


def test_a_missing_shard_is_named(tmp_path):
    folder = tiny_model(tmp_path, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BrokenCheckpoint, match=r"model-00002-of-00002\.safetensors is missing"):
        SafetensorsFolder(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_invalid_index_is_refused(folder, content):
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(BrokenCheckpoint, match="is not an index of weights"):
        SafetensorsFolder(folder)


def test_empty_and_scalar_tensors_can_be_read(tmp_path):
    scalar = torch.ones(()).numpy()
    empty = torch.ones(0, 3).numpy()
    write_shard(tmp_path / "model.safetensors", {"empty": empty, "scalar": scalar}, "float32")
    found = dict(SafetensorsFolder(tmp_path))
    assert found["empty"].shape == (0, 3)
    assert found["scalar"] == 1


# In a separate process: here, memory freed by earlier tests would be reused and would not be seen to grow.
WATCHED_LOAD = """
import sys
from pathlib import Path
from headgate.models import build_model, read_spec
from headgate.device.weights.loading import SafetensorsFolder, load_weights

folder, backend = Path(sys.argv[1]), sys.argv[2]

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

class Watched(SafetensorsFolder):
    peak = 0

    def __iter__(self):
        for name, tensor in super().__iter__():
            yield name, tensor
            self.peak = max(self.peak, resident())

model = build_model(read_spec(folder), backend=backend)
source, before = Watched(folder), resident()
load_weights(model, source)
print(source.peak - before)
"""


@pytest.mark.parametrize("backend", available_backends())
def test_loading_never_holds_a_second_copy_of_the_model(tmp_path, backend):
    size = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    folder = tiny_model(tmp_path, tokenizer=False, **size)
    stored = (folder / "model.safetensors").stat().st_size
    command = [sys.executable, "-c", WATCHED_LOAD, str(folder), backend]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    assert 0.5 * stored < peak < 1.25 * stored


def test_the_progress_bar_is_hidden_without_a_terminal(model, folder, capsys):
    load_weights(model, SafetensorsFolder(folder), progress=True)
    assert capsys.readouterr().err == ""
