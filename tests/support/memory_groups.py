"""Control groups that limit the memory of a test's processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.waiting import eventually


@contextlib.contextmanager
def memory_group(mib: int) -> Iterator[Path]:
    """Create a control group with a memory limit in MiB. Skips the test if the machine cannot create one."""
    version_1 = Path("/sys/fs/cgroup/memory")
    root, limit = (version_1, "memory.limit_in_bytes") if version_1.is_dir() else (version_1.parent, "memory.max")
    group = root / f"hil-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(mib << 20))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    with contextlib.suppress(OSError):
        eventually(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def join_group(group: Path) -> str:
    """Return the shell line that moves the shell into a group."""
    return f"echo $$ > {group}/cgroup.procs"


@contextlib.contextmanager
def memory_used(group: Path, mib: int) -> Iterator[None]:
    """Allocate this many MiB of a group's memory in another process."""
    fill = f"import sys; kept = bytearray({mib} << 20); print(flush=True); sys.stdin.read()"
    command = ["sh", "-c", f'{join_group(group)} && exec "$@"', "sh", sys.executable, "-c", fill]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as others:
        assert others.stdin is not None and others.stdout is not None and others.stdout.readline()
        try:
            yield
        finally:
            others.stdin.close()
