"""How much memory is free."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.device.memory import free_in_cgroup, free_on_machine


def test_free_memory_is_what_the_kernel_says_is_available(tmp_path: Path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16000 kB\nMemFree:  10 kB\nMemAvailable:    2000 kB\nHugePages_Total:  0\n")
    assert free_on_machine(meminfo) == 2000 * 1024


@pytest.mark.parametrize(("limit", "free"), [("1000", 350), ("500", 0), ("max", 2**63)])
def test_a_container_has_what_its_limit_leaves_and_its_page_cache(tmp_path: Path, limit: str, free: int):
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 600\ninactive_file 50\nactive_file 50\n")
    assert free_in_cgroup(tmp_path) == free


def test_without_a_container_there_is_no_limit(tmp_path: Path):
    assert free_in_cgroup(tmp_path) == 2**63
