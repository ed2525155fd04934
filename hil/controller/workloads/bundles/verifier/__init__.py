"""Verifier of bundles for boards without Python: a small C program that Zig builds for any target."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hil.controller.storage.sources.packages import require_version
from hil.controller.storage.tool_caches import make_tool_environment
from hil.core import own_version
from hil.core.files import replace_file
from hil.core.processes import make_module_command
from hil.errors import StorageError, UsageError

EXTRA = "verifier"
SOURCES = Path(__file__).parent
COMMAND_RUNTIME = SOURCES / "command.c"
# Fused multiply-add rounds differently and could change verdicts.
FLAGS = ("-std=gnu11", "-ffp-contract=off")
_BUILD = ("-O2", "-g0", "-s", "-Wno-unused-command-line-argument")
_ARCH = {"amd64": "x86_64", "arm64": "aarch64"}
_ERROR = re.compile(r"(?:error: |undefined symbol: )(?P<what>.*)")


def own_target() -> str:
    """Return Zig's name for this machine's target."""
    machine = platform.machine().lower()
    return f"{_ARCH.get(machine, machine)}-linux-{'gnu' if platform.libc_ver()[0] == 'glibc' else 'musl'}"


def build_verifier(
    output: Path, target: str = "", *, runtime: Path = COMMAND_RUNTIME, arguments: Sequence[str] = ()
) -> str:
    """Build the verifier and return the target.

    Args:
        target: Zig's name of the target; "" is this machine. With musl (``aarch64-linux-musl``) the binary is static.
        runtime: C or C++ source of the runtime, with the functions of ``runtime.h``.
        arguments: for the compiler and the linker, such as libraries and include directories.

    Raises:
        UsageError: Zig is not installed, does not support the target, or fails to compile or link.
        StorageError: the file cannot be written.
    """
    require_version("ziglang", EXTRA)
    target = target or own_target()
    if not runtime.is_file():
        raise UsageError(
            f"no such file: {runtime}", hint="--runtime requires a source file with the functions of runtime.h"
        )
    sources = [*sorted(set(SOURCES.glob("*.c")) - {COMMAND_RUNTIME}), runtime.absolute()]
    try:
        with replace_file(output) as made:
            what = [f'-DHIL_VERSION="{own_version()}"', f"-I{SOURCES}", *map(str, sources), *arguments]
            run_zig_cc([*_BUILD, *FLAGS, *what, "-lm", "-o", str(made.absolute())], target)
            made.chmod(0o755)
    except OSError as error:
        raise StorageError(f"{output} cannot be written: {error.strerror}", hint="use a different file") from error
    return target


def run_zig_cc(arguments: Sequence[str], target: str) -> None:
    """Compile and link for a target. Raises UsageError if Zig fails."""
    command = make_module_command("ziglang", "cc", "-target", target, *arguments)
    ended = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env=os.environ | make_tool_environment(),
    )
    if ended.returncode:
        printed = ended.stderr + ended.stdout
        errors = list(dict.fromkeys(match["what"].strip() for match in _ERROR.finditer(printed)))
        raise UsageError(
            f"Zig cannot build the verifier for {target}: {'; '.join(errors[:3]) or f'exit code {ended.returncode}'}",
            hint="use a target of Zig: aarch64-linux-musl, arm-linux-musleabihf, riscv64-linux-musl, ...",
            detail=printed[-4000:],
        )
