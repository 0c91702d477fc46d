"""Faults in a fleet of real processes for a minute, and the end of an interrupted run."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.api.serving import clean_environment, command, wait_until

RUN_S = 540.0


def chaos(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("chaos", *arguments), capture_output=True, text=True, timeout=RUN_S, env=clean_environment()
    )


@pytest.mark.slow
@pytest.mark.timeout(RUN_S + 240)
def test_36_41_53_a_minute_of_faults_loses_no_token_and_leaks_nothing(tmp_path):
    done = chaos("--minutes", 1, "--clients", 32, "--seed", 3, "--report", tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads((tmp_path / "chaos.json").read_text())
    assert report["ok"] and report["wrong_answers"] == 0 and report["unexplained"] == {}
    assert sum(report["faults"].values()) == 30 and report["ends"]["whole"] > 30
    assert (tmp_path / "timeline.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(RUN_S + 240)
def test_a_minute_of_aborts_pauses_and_updates_does_not_grow_the_processes(tmp_path):
    done = chaos("--minutes", 1, "--clients", 32, "--only", "clients,operators", "--report", tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads((tmp_path / "chaos.json").read_text())
    assert report["servers_started_again"] == 0
    # A router, 3 servers, 3 engines.
    assert set(report["memory_mb"]) == set(report["at_rest"]) and len(report["at_rest"]) == 7


@pytest.mark.slow
@pytest.mark.timeout(RUN_S + 240)
def test_an_interrupted_run_is_judged_as_far_as_it_got_and_leaves_no_process(tmp_path):
    mark = str(tmp_path)
    process = subprocess.Popen(
        command("chaos", "--minutes", 60, "--clients", 8, "--servers", 2, "--report", tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment(CHAOS_TEST=mark),
    )
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
    reader.start()
    try:
        wait_until(lambda: len(_running_with(mark)) > 6, 200)  # the check sees something
        wait_until(lambda: "fault:" in _read(tmp_path / "fleet.log"), 200)
        process.send_signal(signal.SIGINT)
        assert process.wait(RUN_S) == 0, "".join(lines)[-4000:]
    finally:
        process.kill()
        reader.join(10)
        process.stdout.close()
    assert "all is well" in lines[-1]
    assert _running_with(mark) == []


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _running_with(mark: str) -> list[int]:
    """Return the processes whose environment contains `mark`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found
