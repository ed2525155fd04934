"""A local shell with a separate home, and an agent small enough for repeated deploys."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hil.controller.devices.deploy import probe
from hil.controller.devices.deploy.ensure import AgentRecipe
from hil.controller.devices.deploy.packages import File
from hil.controller.devices.deploy.wheels import WheelGroup
from hil.errors import BoardError

# Accepts connections like an agent, and stops on request unless its store marks the device as in use.
SMALL_AGENT = """
import pathlib, signal, socket, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
in_use = pathlib.Path(options["--store"], "in-use")
asked = []
signal.signal(signal.SIGHUP, lambda *_: asked.append(1))
server = socket.socket(socket.AF_UNIX)
server.bind(options["--listen"].removeprefix("unix:"))
server.listen()
while not asked or in_use.exists():
    time.sleep(0.02)
"""


@dataclass(frozen=True)
class Done:
    argv: tuple[str, ...]
    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode(errors="replace").strip()


@dataclass
class LocalShell:
    """Stand-in for hil.controller.devices.ssh.shell.Shell without SSH.

    ``cut_after``: bytes of stdin before the connection breaks.
    ``mounted``: mount options of hil's directory for its commands.
    """

    home: Path
    path: str = f"{Path(sys.executable).resolve().parent}:/usr/bin:/bin"
    address: str = "here"
    cut_after: int | None = None
    mounted: str = ""
    commands: list[tuple[str, ...]] = field(default_factory=list)

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Path | None = None,
        timeout: float = 30.0,
        check: bool = True,
        progress: Callable[[int], None] = lambda size: None,
    ) -> Done:
        self.commands.append(tuple(argv))
        data = stdin.read_bytes() if isinstance(stdin, Path) else stdin or b""
        if self.cut_after is not None and isinstance(stdin, Path):
            data = data[: self.cut_after]
        environment = {"HOME": str(self.home), "PATH": self.path}
        if self.mounted:
            mount = f'mount --bind "$0" "$0" && mount -o remount,bind,{self.mounted} "$0" && exec "$@"'
            argv = ["unshare", "-m", "sh", "-c", mount, str(self.home / ".hil"), *argv]
        done = subprocess.run(argv, input=data, capture_output=True, timeout=timeout, env=environment, cwd=self.home)
        err = done.stderr.decode(errors="replace")
        if check and done.returncode:
            raise BoardError(f"{argv[0]} failed", detail=err)
        return Done(tuple(argv), done.returncode, done.stdout, err)


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[Callable[..., LocalShell]]:
    """Return a function that makes shells with a shared home; agents deployed there are stopped afterwards."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)

    def make(**settings: object) -> LocalShell:
        return LocalShell(home, **settings)

    yield make
    probe.clean(LocalShell(home), "", force=True)


@pytest.fixture(scope="session")
def small() -> Callable[..., AgentRecipe]:
    """Recipes of an agent without packages; different texts give different builds."""

    def make(text: str = "", main: str = SMALL_AGENT) -> AgentRecipe:
        files = {"hil/__init__.py": f"# {text}", "hil/agent/__init__.py": "", "hil/agent/__main__.py": main}
        return AgentRecipe(
            {name: File.of(content.encode()) for name, content in files.items()}, WheelGroup("agent", ()), ()
        )

    return make


@pytest.fixture
def shell(shells: Callable[..., LocalShell]) -> LocalShell:
    return shells()
