"""`headgate bench compare`: ratios to the first run, and a plot."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from headgate import cli
from headgate.bench import lifecycle, prefix
from headgate.bench.client import TimedRequest
from headgate.bench.compare import read_runs
from headgate.bench.load import ClosedLoop, Load, Result
from headgate.bench.report import Spread, save_json, saved


def serve_result(path: Path, *, first_token_s: float, elapsed_s: float, failed: int = 0) -> Path:
    samples = [TimedRequest(i, first_token_s, 0.5, [0.1] * 4, 7, 5, "length", None) for i in range(4)]
    samples += [TimedRequest(error="timeout", gaps_s=[]) for _ in range(failed)]
    save_json(saved(Result(Load(url="u", pace=ClosedLoop(1), requests=4), "m", elapsed_s, samples)), path)
    return path


def lifecycle_result(path: Path, *reports: tuple[str, float]) -> Path:
    made = [
        lifecycle.LifecycleReport(url=url, model="m", concurrency=1, rounds=1, abort_ms=Spread(ms, ms, ms, ms, ms))
        for url, ms in reports
    ]
    save_json(made, path)
    return path


def row(out: str, name: str) -> list[str]:
    (line,) = [line for line in out.splitlines() if line.startswith(name)]
    return line.removeprefix(name).split()


def test_two_runs_are_compared_figure_by_figure(tmp_path, capsys):
    a = serve_result(tmp_path / "a.json", first_token_s=0.2, elapsed_s=2.0)
    b = serve_result(tmp_path / "b.json", first_token_s=0.1, elapsed_s=1.0, failed=2)
    assert cli.main(["bench", "compare", str(a), str(b)], {}) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["a", "b", "ratio"]
    assert row(out, "tokens/s output") == ["10.00", "20.00", "2.00"]
    assert row(out, "first token, ms p99") == ["200.00", "100.00", "0.50"]
    assert row(out, "between tokens, ms p50") == ["100.00", "100.00", "1.00"]
    assert row(out, "requests failed") == ["0.00", "2.00", "-"]


def test_servers_in_one_lifecycle_file_are_compared_with_each_other(tmp_path, capsys):
    file = lifecycle_result(tmp_path / "l.json", ("http://one", 4.0), ("http://two", 8.0))
    assert cli.main(["bench", "compare", str(file), "--plot", str(tmp_path / "l.png")], {}) == 0
    assert row(capsys.readouterr().out, "abort, ms p50") == ["4.00", "8.00", "2.00"]
    assert (tmp_path / "l.png").read_bytes().startswith(b"\x89PNG")


def test_a_third_file_is_compared_with_the_first(tmp_path, capsys):
    files = [serve_result(tmp_path / f"{i}.json", first_token_s=0.1 * i, elapsed_s=1.0) for i in (1, 2, 3)]
    assert cli.main(["bench", "compare", *map(str, files), "--plot", str(tmp_path / "p.png")], {}) == 0
    assert row(capsys.readouterr().out, "first token, ms p50") == ["100.00", "200.00", "2.00", "300.00", "3.00"]
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_prefix_results_are_compared_too(tmp_path):
    reading = prefix.PrefixReading(Spread(1, 1, 1, 1, 1), 10, 0.9)
    for name in ("a", "b"):
        save_json(prefix.PrefixReport("u", "m", 1, 8, reading, reading), tmp_path / f"{name}.json")
    runs = read_runs([tmp_path / "a.json", tmp_path / "b.json"])
    assert [run.figures["warm prompt", "cached share"] for run in runs] == [0.9, 0.9]


def test_files_of_the_same_name_are_shown_with_their_folders(tmp_path, capsys):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        serve_result(tmp_path / folder / "r.json", first_token_s=0.1, elapsed_s=1.0)
    cli.main(["bench", "compare", str(tmp_path / "x/r.json"), str(tmp_path / "y/r.json")], {})
    assert capsys.readouterr().out.split()[:2] == [str(tmp_path / "x/r"), str(tmp_path / "y/r")]


def test_runs_that_cannot_be_compared_are_refused_in_one_sentence(tmp_path, capsys):
    load = serve_result(tmp_path / "a.json", first_token_s=0.1, elapsed_s=1.0)
    life = lifecycle_result(tmp_path / "l.json", ("u", 1.0))
    (tmp_path / "other.json").write_text('{"x": 1}')
    for files, about in (
        ([load, life], "results of different benchmarks"),
        ([load], "only one result"),
        ([load, tmp_path / "other.json"], "is not a result of"),
        ([load, tmp_path / "none.json"], "cannot be read"),
    ):
        assert cli.main(["bench", "compare", *map(str, files)], {}) == cli.WRONG_USE
        errors = capsys.readouterr().err
        assert about in errors and errors.count("\n") == 1


def test_an_old_result_without_newer_fields_still_reads(tmp_path):
    path = serve_result(tmp_path / "a.json", first_token_s=0.1, elapsed_s=1.0)
    old = msgspec.json.decode(path.read_bytes())
    del old["summary"]["dataset"], old["summary"]["cached_share"]
    for sample in old["samples"]:
        del sample["cached_tokens"]
    path.write_bytes(msgspec.json.encode(old))
    assert len(read_runs([path, path])) == 2


def test_an_unwritable_result_file_is_refused_before_the_benchmark_runs(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "serve", "--json", str(tmp_path / "none" / "a.json")], {})
    assert end.value.code == cli.WRONG_USE and "there is no folder" in capsys.readouterr().err


def test_a_closed_output_pipe_is_not_an_error(tmp_path):
    file = serve_result(tmp_path / "a.json", first_token_s=0.1, elapsed_s=1.0)
    program = shlex.join([sys.executable, "-m", "headgate.cli", "bench", "compare", str(file), str(file)])
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = ["bash", "-c", f"{program} | true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=buffered)
    assert done.stderr == ""
