"""Building and loading the CPU kernels: if something is missing, the result is a reason, not an exception."""

import subprocess
from pathlib import Path

import pytest

from headgate.layers.cpu import Kernels, NotCompiled, build, load_kernels


def failing_compiler(folder: Path, message: str) -> Path:
    """A compiler that prints `message`, fails, and adds a line to the file `calls` in `folder`."""
    compiler = folder / "failing"
    compiler.write_text(f'#!/bin/sh\necho >> {folder}/calls\necho "{message}" >&2\nexit 1\n')
    compiler.chmod(0o755)
    return compiler


def calls_in(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines())


def test_a_missing_compiler_is_a_reason(tmp_path: Path) -> None:
    loaded = load_kernels(compiler="no-such-compiler", cache=tmp_path)
    assert isinstance(loaded, NotCompiled)
    assert "no-such-compiler not found" in loaded.reason


def test_a_failing_compiler_is_a_reason_and_leaves_no_library(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    compiler = failing_compiler(tmp_path, "fatal error: torch.h not found")
    loaded = load_kernels(compiler=str(compiler), cache=tmp_path / "cache")
    assert isinstance(loaded, NotCompiled)
    assert "torch.h not found" in loaded.reason
    assert not list(tmp_path.rglob("*.so"))
    assert capfd.readouterr().err.startswith("headgate: compiling CPU kernels, once")


REJECTED = "torch/Half.h:3:7: error: 'bit_width' is not a member of 'std'"


def test_a_compiler_that_rejects_the_sources_is_called_once_per_version(tmp_path: Path) -> None:
    compiler = failing_compiler(tmp_path, REJECTED)
    library = tmp_path / "hash" / "kernels.so"
    first = build._build(str(compiler), library)
    assert isinstance(first, NotCompiled) and REJECTED in first.reason
    assert first.remedy is not None and str(library.parent / "failure") in first.remedy
    calls = calls_in(tmp_path)
    assert build._build(str(compiler), library) == first and calls_in(tmp_path) == calls
    failing_compiler(tmp_path, f"{REJECTED} (a later version)")
    again = build._build(str(compiler), library)
    assert isinstance(again, NotCompiled) and "a later version" in again.reason


@pytest.mark.parametrize("message", ["Python.h: fatal error: not found", "internal compiler error: killed", "crash"])
def test_a_failure_that_may_pass_is_not_remembered(tmp_path: Path, message: str) -> None:
    compiler = failing_compiler(tmp_path, message)
    library = tmp_path / "hash" / "kernels.so"
    for _ in range(2):
        before = calls_in(tmp_path) if (tmp_path / "calls").exists() else 0
        failed = build._build(str(compiler), library)
        assert isinstance(failed, NotCompiled) and message in failed.reason and calls_in(tmp_path) > before


def test_the_flags_allow_the_headers_of_torch_2_15(tmp_path: Path) -> None:
    source = tmp_path / "bits.cpp"
    source.write_text("#include <bit>\nint main() { return std::bit_width(0u); }\n")
    subprocess.run(["g++", *build.COMMON_FLAGS, "-fsyntax-only", str(source)], check=True)


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
