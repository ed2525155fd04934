"""What the scripts that draw docs/images share: a browser, a run of this hil, and a limit for the pictures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT / "tests"))


def installed_browser() -> str:
    """The browser that draws; ends the script where there is none."""
    from support.browser import NAMES, find_browser

    found = find_browser()
    if found is None:
        sys.exit(f"browser not found on PATH ({', '.join(NAMES)}); on Debian and Ubuntu: apt install chromium")
    return found


def run_hil(command: Sequence[str], folder: str, codes: Collection[int] = (0,)) -> None:
    """Run this checkout's hil in a folder; ends the script where it ends with another code than these."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "hil.controller.cli.main", *command], cwd=folder, env=environment)
    if done.returncode not in codes:
        sys.exit(f"hil {' '.join(command)} ended with exit code {done.returncode}")


def tell_size(picture: Path, largest: int) -> None:
    """Say how large a picture became; ends the script where that is more than so many bytes."""
    size = picture.stat().st_size
    if size > largest:
        sys.exit(f"{picture.relative_to(ROOT)}: expected at most {largest} bytes, got {size}")
    print(f"{picture.relative_to(ROOT)}: {size} bytes")
