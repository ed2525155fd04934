"""Shell on this machine with the interface of :class:`hil.controller.devices.ssh.shell.Shell`, for agentless boards.

It passes commands to ``sh`` exactly as sshd passes them to a login shell, so the tests cover quoting.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hil.controller.devices.ssh.shell import Done
from hil.errors import BoardError, BoardLost


@dataclass
class LocalShell:
    """Run commands in a directory that replaces the board's home directory.

    Attributes:
        home: the directory.
        path: the PATH of the commands.
        sh: the login shell.
        commands: all commands that ran.
        puts: name and size of all uploaded files.
        cut_at_put: number of the upload (from 1) at which the connection breaks; 0 is never.
    """

    home: Path
    path: str = os.environ["PATH"]
    sh: str = "/bin/sh"
    address: str = "local"
    fingerprint: str = "SHA256:none"
    user: str = "tester"
    commands: list[tuple[str, ...]] = field(default_factory=list)
    puts: list[tuple[str, int]] = field(default_factory=list)
    cut_at_put: int = 0
    closed: bool = False

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Path | None = None,
        timeout: float = 30.0,
        check: bool = True,
    ) -> Done:
        assert stdin is None
        self.commands.append(tuple(argv))
        environment = {"HOME": str(self.home), "PATH": self.path, "LC_ALL": "C"}
        command = [self.sh, "-c", shlex.join(argv)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.home,
            env=environment,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise BoardLost(f"{argv[0]} did not answer in {timeout:g} s") from error
        done = Done(tuple(argv), process.returncode, out, err.decode(errors="replace"))
        if check and done.code:
            raise BoardError(f"{argv[0]} failed", detail=done.err)
        return done

    def put(
        self, local: Path, remote: str, *, mode: int = 0o600, progress: Callable[[int], None] | None = None
    ) -> None:
        self.puts.append((Path(remote).name, local.stat().st_size))
        if len(self.puts) == self.cut_at_put:
            raise BoardLost("the link broke")
        temporary = self.home / f"{remote}.{secrets.token_hex(4)}"
        shutil.copyfile(local, temporary)
        temporary.chmod(mode)
        temporary.rename(self.home / remote)
        if progress:
            progress(local.stat().st_size)

    def get(self, remote: str, local: Path, most: int) -> None:
        assert (self.home / remote).stat().st_size <= most
        shutil.copyfile(self.home / remote, local)

    def close(self) -> None:
        self.closed = True
