"""Runs a command as on a machine that booted a minute ago: `python tests/just_started.py pytest ...`.

A monotonic clock starts at boot, so a bug of the kind "0.0 is long ago" shows only shortly after boot (guarantee 80).
A time namespace simulates that on any machine; where none can be created, the command runs on the machine's clock.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

UP_S = 60
NEW_TIME, NEW_USER = 0x00000080, 0x10000000  # flags of unshare(2)
CLOCKS = {"monotonic": time.CLOCK_MONOTONIC, "boottime": time.CLOCK_BOOTTIME}


def main(command: list[str]) -> int:
    if not command:
        raise SystemExit(f"usage: {sys.argv[0]} COMMAND [ARGUMENT ...]")
    try:
        enter_time_namespace(UP_S)
    except OSError as error:
        print(f"on the machine's own clock: this kernel allows no time namespace here ({error})", flush=True)
    else:
        print(f"as on a machine that has been up for {UP_S} s", flush=True)
    return run(command)


def enter_time_namespace(up_s: int) -> None:
    """Set the clock for children of this process. Without privileges, in a user namespace that keeps the user id."""
    user, group = os.geteuid(), os.getegid()
    offsets = "".join(f"{name} {up_s - int(time.clock_gettime(clock))} 0\n" for name, clock in CLOCKS.items())
    try:
        unshare(NEW_TIME)
    except PermissionError:
        unshare(NEW_TIME | NEW_USER)
        process = Path("/proc/self")
        (process / "setgroups").write_text("deny")
        (process / "uid_map").write_text(f"{user} {user} 1")
        (process / "gid_map").write_text(f"{group} {group} 1")
    Path("/proc/self/timens_offsets").write_text(offsets)


def unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def run(command: list[str]) -> int:
    """Run in a child, because a time namespace applies to children only; forward signals to it."""
    child = os.fork()
    if child == 0:
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
            os._exit(127)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to both
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(child, number))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
