"""`headgate doctor`: its findings, and an exit code that tells whether a server could start."""

from __future__ import annotations

import json
import resource
import socket
from pathlib import Path

import pytest

from headgate import cli, doctor
from headgate.doctor import GIB, Finding, Requirement

NEEDED = [Requirement.of("torch>=2.11"), Requirement.of('matplotlib>=3.9; extra == "bench"')]
AVX512 = frozenset(("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"))


def test_this_machine_can_serve_and_each_subject_has_one_line(tmp_path, capsys):
    assert cli.main(["doctor", "--port", "0"], {"XDG_CACHE_HOME": str(tmp_path)}) == 0
    *lines, _, last = capsys.readouterr().out.splitlines()
    assert last == "This machine can serve."
    assert all(line.split()[0] in ("ok", "note") for line in lines)
    subjects = {line[9:21].strip() for line in lines}
    assert {"python", "libraries", "cpu", "kernels", "routing", "memory", "cache", "port", "open files"} <= subjects
    assert any(str(tmp_path) in line for line in lines)


def test_findings_are_also_printed_as_json(tmp_path, capsys):
    assert cli.main(["doctor", "--json", "--port", "0"], {"XDG_CACHE_HOME": str(tmp_path)}) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["can_serve"] is True
    assert all(set(finding) == {"subject", "verdict", "found", "meaning"} for finding in printed["findings"])


def test_doctor_builds_and_leaves_nothing(tmp_path):
    cli.main(["doctor", "--port", "0"], {"XDG_CACHE_HOME": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def test_a_problem_makes_the_exit_code_1(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "version_of", {}.get)
    assert cli.main(["doctor", "--port", "0"], {}) == cli.FAILED
    assert "problem  torch        not installed" in capsys.readouterr().out


def test_each_missing_or_outdated_library_is_a_problem():
    (missing,) = doctor.libraries(NEEDED, {}.get)
    (old,) = doctor.libraries(NEEDED, {"torch": "2.9.1+cpu"}.get)
    (right,) = doctor.libraries(NEEDED, {"torch": "2.11"}.get)
    assert (missing.verdict, old.verdict, right.verdict) == ("problem", "problem", "ok")
    assert "2.11 or later" in old.meaning


def test_a_missing_extra_is_a_note_with_the_install_command():
    (note,) = doctor.options(NEEDED, {}.get)
    (ok,) = doctor.options(NEEDED, {"matplotlib": "3.10"}.get)
    assert note.verdict == "note" and "headgate[bench]" in note.meaning
    assert ok.verdict == "ok" and "matplotlib 3.10" in ok.found


def test_every_extra_of_the_package_has_a_purpose():
    extras = {each.extra for each in doctor._requirements()} - {None, "dev", "docs"}
    assert extras <= set(doctor.EXTRAS)


@pytest.mark.parametrize(
    ("flags", "kernels"),
    [
        (AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}, "AMX"),
        (AVX512 | {"avx512_bf16"}, "AVX512-BF16"),
        (AVX512, "AVX-512"),
        (frozenset(("avx2", "fma")), "AVX2"),
    ],
)
def test_cpu_features_determine_the_kernels(flags, kernels):
    finding = doctor.cpu(flags, None, threads=8)
    assert finding.verdict == "ok" and finding.found.endswith(f"8 threads, {kernels}")


def test_the_reported_kernels_are_those_that_run():
    """The rule exists twice, in Python and in C++; on this machine both must agree."""
    from headgate.layers.cpu import build

    isas = build.supported_isas()
    if not isas:
        pytest.skip("no compiled kernels on this machine")
    named = {"amx": "AMX", "avx512-bf16": "AVX512-BF16", "avx512": "AVX-512", "avx2": "AVX2"}[isas[0]]
    assert doctor.cpu(build.cpu_flags(), None, 1).found.endswith(named)


def test_a_cpu_without_kernels_is_slow_and_not_a_problem():
    finding = doctor.cpu(frozenset(), "this CPU lacks avx2", 4)
    assert finding.verdict == "note" and "this CPU lacks avx2" in finding.meaning


@pytest.mark.parametrize(
    ("built", "compiler", "verdict", "found"),
    [(True, None, "ok", "built"), (False, "/usr/bin/g++", "ok", "not built yet"), (False, None, "note", "no C++")],
)
def test_kernels_are_built_can_be_built_or_need_a_compiler(built, compiler, verdict, found, tmp_path):
    library = tmp_path / "kernels.so"
    if built:
        library.touch()
    finding = doctor.kernels(None, library, compiler)
    assert finding.verdict == verdict and found in finding.found


def test_a_compiler_that_is_known_to_fail_on_the_kernels_is_named(tmp_path):
    finding = doctor.kernels(None, tmp_path / "kernels.so", "/usr/bin/g++", "kernels.cpp:1:1: error: no")
    assert finding.verdict == "note"
    assert finding.found == "/usr/bin/g++ cannot compile them (kernels.cpp:1:1: error: no)"


@pytest.mark.parametrize(
    ("built", "compiler", "verdict", "found"),
    [
        (True, None, "ok", "compiled, in"),
        (False, "/usr/bin/cc", "ok", "not compiled yet"),
        (False, None, "note", "no C "),
    ],
)
def test_routing_is_compiled_can_be_compiled_or_needs_a_compiler(built, compiler, verdict, found, tmp_path):
    library = tmp_path / "routing.so"
    if built:
        library.touch()
    finding = doctor.routing(library, compiler)
    assert finding.verdict == verdict and found in finding.found


class TwoGpus:
    """`torch.cuda` with two GPUs."""

    def device_count(self) -> int:
        return 2

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return (70 - index) * GIB, 80 * GIB

    def get_device_name(self, index: int) -> str:
        return "GPU"


def test_each_gpu_has_a_line_and_needs_triton():
    first, second = doctor.gpus(TwoGpus(), "3.9.0")
    assert (first.verdict, first.found) == ("ok", "GPU, 70.0 of 80.0 GiB free")
    assert second.subject == "gpu 1" and "30 billion" in first.meaning
    assert [finding.verdict for finding in doctor.gpus(TwoGpus(), None)] == ["problem", "problem"]


def test_a_tree_that_is_not_installed_is_a_note():
    (note,) = doctor.libraries([], {}.get)
    assert note.verdict == "note" and "not installed" in note.found


def test_memory_reports_the_model_size_that_fits():
    assert doctor.memory("memory", GIB // 2).verdict == "problem"
    assert "6.9 billion" in doctor.memory("memory", 16 * GIB).meaning


def test_a_taken_port_is_a_note():
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        assert doctor.port("127.0.0.1", taken).verdict == "note"
    assert doctor.port("127.0.0.1", 0).verdict == "ok"
    assert doctor.port("no.such.host.invalid", 0).verdict == "note"


def test_few_open_files_are_a_note():
    assert doctor.open_files(1024, 4096).verdict == "note"
    assert doctor.open_files(65536, 65536).verdict == "ok"
    assert doctor.open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY).verdict == "ok"


def test_a_cache_that_cannot_be_written_is_a_note(tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    assert doctor.cache_folder(file / "headgate").verdict == "note"
    assert doctor.cache_folder(tmp_path / "not" / "yet").verdict == "ok"


def test_only_a_problem_stops_a_server():
    note, problem = Finding("a", "note", "", ""), Finding("b", "problem", "", "")
    assert doctor.can_serve([note]) and not doctor.can_serve([note, problem])
