"""Building and loading the CPU kernels: if something is missing, the result is a reason, not an exception."""

from pathlib import Path

import pytest

from headgate.layers.cpu import Kernels, NotCompiled, build, load_kernels


def test_a_missing_compiler_is_a_reason(tmp_path: Path) -> None:
    loaded = load_kernels(compiler="no-such-compiler", cache=tmp_path)
    assert isinstance(loaded, NotCompiled)
    assert "no-such-compiler not found" in loaded.reason


def test_a_failing_compiler_is_a_reason_and_leaves_no_library(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    compiler = tmp_path / "failing"
    compiler.write_text("#!/bin/sh\necho 'fatal error: torch.h not found' >&2\nexit 1\n")
    compiler.chmod(0o755)
    loaded = load_kernels(compiler=str(compiler), cache=tmp_path / "cache")
    assert isinstance(loaded, NotCompiled)
    assert "torch.h not found" in loaded.reason
    assert not list(tmp_path.rglob("*.so"))
    assert capfd.readouterr().err.startswith("headgate: compiling CPU kernels, once")


def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    loaded = load_kernels(cache=tmp_path / "file" / "cache")
    assert isinstance(loaded, NotCompiled)
    assert "cannot build or load" in loaded.reason


def test_an_instruction_set_this_cpu_lacks_is_a_reason() -> None:
    loaded = load_kernels("sve2")
    assert isinstance(loaded, NotCompiled)
    assert "does not run sve2" in loaded.reason


def test_a_lesser_cpu_is_told_what_it_lacks() -> None:
    assert build.why_not_here(frozenset({"sse4_2", "fma", "f16c"})) == "this CPU lacks avx2"
    assert build.why_not_here(frozenset({"avx2", "fma", "f16c"})) is None


def test_the_best_instruction_set_is_the_default() -> None:
    loaded = load_kernels()
    assert isinstance(loaded, Kernels)
    assert loaded.isa == build.supported_isas()[0]


def test_the_fingerprint_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build._fingerprint()
    for path in (*build.SOURCES.glob("*.h"), *build.SOURCES.glob("*.cpp")):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build._fingerprint() == before
    (tmp_path / "gemm.h").write_text("// changed")
    assert build._fingerprint() != before


def test_a_library_another_process_built_meanwhile_is_taken(tmp_path: Path) -> None:
    library = tmp_path / "hash" / "kernels.so"
    library.parent.mkdir()
    library.touch()
    assert build._build("true", library) == library
