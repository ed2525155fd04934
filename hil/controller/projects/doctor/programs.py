"""Check programs of other projects: ssh, git, a browser, and the tools of virtual boards."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import webbrowser
from collections.abc import Iterator
from pathlib import Path

from hil.controller.analysis.profile.perfetto import has_screen
from hil.controller.devices.ssh.openssh import client
from hil.controller.projects.doctor.results import NOTE, make_check
from hil.controller.records.commands.projects import EnvironmentCheck

_SECONDS = 10.0
_NAMESPACE_SECONDS = 60.0
# A checkout has the script for virtual boards next to the package.
_CHECKOUT = Path(__file__).resolve().parents[4]


def check_programs() -> Iterator[EnvironmentCheck]:
    """Check programs that hil uses if they are installed."""
    yield _check_ssh()
    yield _check_git()
    yield check_browser()
    yield from check_virtual_boards(_CHECKOUT)


def _check_ssh() -> EnvironmentCheck:
    wrong = "" if client.is_usable() else "ssh not found or not usable by this user: hil connects with paramiko"
    fix = "apt-get install openssh-client (Debian, Ubuntu)"
    return make_check("ssh", wrong, wrong or _read_version(["ssh", "-V"]), fix, outcome=NOTE)


def _check_git() -> EnvironmentCheck:
    wrong = "" if shutil.which("git") else "git not found: results contain no commit"
    return make_check("git", wrong, wrong or _read_version(["git", "--version"]), "apt-get install git", outcome=NOTE)


def check_browser() -> EnvironmentCheck:
    """Check that hil can open pages in a graphical browser. Without a browser, commands print the address."""
    try:
        name = str(getattr(webbrowser.get(), "name", "")) if has_screen() else ""
    except webbrowser.Error:
        name = ""
    wrong = "" if name else "no graphical browser: hil prints the addresses of its pages"
    fix = "view the pages from another machine: ssh -L 8790:127.0.0.1:8790 HOST"
    return make_check("browser", wrong, name, fix, outcome=NOTE)


def check_virtual_boards(checkout: Path) -> Iterator[EnvironmentCheck]:
    """Check the namespaces and tools for virtual boards, with the script of the checkout. A wheel has no script."""
    if not (checkout / "scripts" / "virtual-board").is_file():
        return
    command = [sys.executable, "-m", "tools.virtual_board.cli", "check"]
    try:
        done = subprocess.run(
            command,
            cwd=checkout,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_NAMESPACE_SECONDS,
            check=False,
        )
        report = json.loads(done.stdout)
        wrong, fix, fine = str(report["problem"]), str(report["fix"]), str(report["found"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        wrong, fix, fine = f"the check failed: {error}", "scripts/virtual-board check", ""
    yield make_check("virtual boards", wrong, fine, fix, outcome=NOTE)


def _read_version(command: list[str]) -> str:
    """Return the first line of a program's version; ssh prints it to stderr."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"version unknown: {error}"
    lines = (done.stdout or done.stderr).decode(errors="replace").splitlines()
    return lines[0].strip() if lines else ""
