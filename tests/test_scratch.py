"""Scratch folders are removed after their process has ended, also after SIGKILL, and never before."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headgate import scratch
from headgate.testing.tiny import tiny_model
from tests.api.serving import serving, wait_until

HOLD = "import sys, headgate.scratch as s\nwith s.folder('', sys.argv[1]) as own: print(own, flush=True); sys.stdin.read()"


@contextmanager
def holder(parent: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that holds a scratch folder."""
    command = [sys.executable, "-c", HOLD, str(parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_a_folder_is_removed_at_the_end_of_the_block(tmp_path: Path):
    with scratch.folder("x-", tmp_path) as own:
        (own / "a").write_text("a")
        assert own.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_folders_of_killed_processes_are_removed_and_those_of_running_ones_are_kept(tmp_path: Path):
    with holder(tmp_path) as (killed, left), holder(tmp_path) as (_, held):
        killed.send_signal(signal.SIGKILL)
        killed.wait(60)
        assert left.is_dir() and held.is_dir()
        with scratch.folder("", tmp_path) as own:
            assert set(tmp_path.iterdir()) == {held, own}


def test_other_folders_are_left_alone(tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / scratch.LOCK).touch()
    parent = tmp_path / "temporary"
    parent.mkdir()
    (parent / "headgate-link").symlink_to(outside)
    (parent / "headgate-crashes-0").mkdir()  # no lock
    (parent / "other").mkdir()
    (parent / "other" / scratch.LOCK).touch()
    before = set(parent.iterdir())
    with scratch.folder("", parent):
        assert before < set(parent.iterdir()) and (outside / scratch.LOCK).exists()


def test_a_server_removes_only_the_folder_of_a_killed_server(tmp_path: Path):
    """A server is killed with SIGKILL; the next one starts in the same temporary directory."""
    model, temporary = tiny_model(tmp_path / "model"), tmp_path / "t"
    temporary.mkdir()
    settings = (model, "--kv-blocks", 64, "--max-running", 2)
    environment = {"TMPDIR": str(temporary)}

    def folders() -> set[Path]:
        return {path.parent for path in temporary.glob(f"headgate-*/{scratch.LOCK}")}

    with serving(*settings, **environment) as killed:
        (left,) = folders()
        engines = killed.engine_pids()
        killed.process.kill()
        killed.process.wait(60)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines.values()))
    assert folders() == {left}
    with holder(temporary) as (_, held), serving(*settings, **environment) as next_one:
        assert held in folders() and left not in folders() and len(folders()) == 2
        assert next_one.stop() == 0
        assert folders() == {held}
