"""The previous release of hil, to run its agent, host, gateway and commands with the current ones."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from hil.core.processes import make_module_command
from support.commands import Ended

# The tag of the previous release; a commit until there is a tag. See "Release" in docs/contributing.md.
PREVIOUS = "53dc1250ad55b8946cbd176e7386c638ffbd9b26"
ROOT = Path(__file__).parents[2]
_PARTS = ("hil", "board_configs", "examples/digits")
_VERSIONS = "import hil.protocol.wire as w, hil.protocol.versions as v; print(w.PROTOCOL, v.FARM_PROTOCOL, w.__file__)"


@dataclass(frozen=True)
class Release:
    """The code of a release, run with the packages of this environment.

    Args:
        root: the directory of the package ``hil``.
        cache: its HIL_CACHE_DIR.
        home: its HOME.
    """

    root: Path
    cache: Path
    home: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(self.root),
            "HIL_CACHE_DIR": str(self.cache),
            "HOME": str(self.home),
            "XDG_CONFIG_HOME": "",
        }

    def hil(self, *args: object, cwd: Path, **variables: str) -> Ended:
        command = make_module_command("hil.controller.cli.main", *map(str, args))
        environment = self.environment | variables
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
        return Ended(done.returncode, done.stdout, done.stderr)

    def protocols(self) -> tuple[int, int]:
        """Return the numbers of the agent's and the farm's protocol."""
        command = [sys.executable, "-c", _VERSIONS]
        printed = subprocess.run(
            command, env=self.environment, cwd=self.home, capture_output=True, text=True, check=True
        )
        agent, farm, file = printed.stdout.split()
        assert Path(file).is_relative_to(self.root)
        return int(agent), int(farm)


def extract_previous(folder: Path) -> bool:
    """Extract the previous release into a directory; returns False where git does not have it."""
    command = ["git", "-C", str(ROOT), "archive", PREVIOUS, *_PARTS]
    try:
        archive = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return False
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return True
