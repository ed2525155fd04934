"""The example packages, installed for tests without pip."""

from __future__ import annotations

import os
from pathlib import Path

from support.pip import install

EXAMPLE, REFERENCE = (Path(__file__).parents[2] / "examples" / name for name in ("hil-npx", "hil-plain-ort"))


def install_npx(site: Path, environment: dict[str, str], package: Path = EXAMPLE) -> None:
    """Install a package in a directory, and add the directory to the environment's import path."""
    site.mkdir(parents=True, exist_ok=True)
    install(package, site)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), environment.get("PYTHONPATH"))))
