"""Fetch Debian packages of any architecture from this machine's apt sources, with a separate apt state.

Mirror, proxy and certificates come from the machine's apt configuration. The machine's package state does not change,
and no code from packages runs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hil.errors import HilError, UsageError
from tools.virtual_board.places import make_private

DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}
SOURCES_VARIABLE = "HIL_DEBIAN_SOURCES"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# Example of a line from apt: 'http://mirror/debian/dists/bookworm-updates/InRelease' file-name 0
_RELEASE = re.compile(r"^'(?P<uri>[^']+)/dists/(?P<suite>[^']+)/InRelease'", re.M)
_SUITE = re.compile(r"(?P<name>[a-z]+)(?P<part>|-updates|-security|/updates)$")
_DEBIAN_NAMES = {"bookworm", "trixie", "forky", "oldstable", "stable", "testing", "sid", "unstable"}


class PackagesUnavailable(HilError):
    """apt could not fetch the packages."""

    exit_code = UsageError.exit_code


@dataclass(frozen=True)
class Apt:
    """A separate apt state for an architecture and a Debian release.

    Args:
        folder: directory of the state, which can be deleted at any time.
        arch: ``x86_64`` or ``aarch64``.
        release: Debian's name of the release.
    """

    folder: Path
    arch: str
    release: str = "bookworm"

    def update(self) -> None:
        """Fetch the package lists.

        Raises:
            UsageError: the machine has no Debian sources.
            PackagesUnavailable: apt failed.
        """
        for place in ("lists/partial", "archives/partial", "etc"):
            make_private(self.folder / place)
        (self.folder / "status").touch()
        sources = _list_sources(self.release)
        (self.folder / "sources.list").write_text(sources)
        # Clear the hooks that the machine's configuration defines for its own updates.
        cleared = "".join(
            f"#clear {name};\n"
            for name in (
                "APT::Update::Pre-Invoke",
                "APT::Update::Post-Invoke",
                "APT::Update::Post-Invoke-Success",
                "DPkg::Post-Invoke",
                "APT::Architectures",
                "APT::Default-Release",
            )
        )
        settings = {
            "APT::Architecture": DEBIAN[self.arch],
            "APT::Architectures::": DEBIAN[self.arch],
            "APT::Sandbox::User": "",
            "APT::Install-Recommends": "false",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
            "Dir::State": str(self.folder),
            "Dir::State::lists": str(self.folder / "lists"),
            "Dir::State::status": str(self.folder / "status"),
            "Dir::Cache": str(self.folder),
            "Dir::Cache::archives": str(self.folder / "archives"),
            "Dir::Etc::SourceList": str(self.folder / "sources.list"),
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::Etc::Preferences": "/dev/null",
            "Dir::Etc::PreferencesParts": "/dev/null",
        }
        text = cleared + "".join(f'{key} "{value}";\n' for key, value in settings.items())
        (self.folder / "apt.conf").write_text(text)
        self._run("update", "-qq", "--error-on=any")

    def download(self, packages: Sequence[str]) -> list[Path]:
        """Fetch packages and all their dependencies.

        Raises:
            PackagesUnavailable: apt failed.
        """
        self._run("install", "-qq", "-y", "--download-only", *packages)
        return sorted((self.folder / "archives").glob("*.deb"))

    def download_alone(self, package: str) -> Path:
        """Fetch a package without dependencies.

        Raises:
            PackagesUnavailable: apt failed, or the package is unknown.
        """
        self._run("download", "-qq", package)
        return next(iter(sorted(self.folder.glob(f"{package}_*.deb"))))

    def _run(self, *arguments: str) -> None:
        command = [find_apt(), "-c", str(self.folder / "apt.conf"), *arguments]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, env=_make_environment())
        if done.returncode:
            raise PackagesUnavailable(
                f"apt cannot fetch packages of Debian {self.release} for {self.arch}",
                hint="see apt's output below; `apt-get update` must work on this machine",
                detail=(done.stderr or done.stdout).strip(),
            )


def get_host_arch() -> str:
    """Return this machine's architecture, as ``uname -m`` prints it."""
    return os.uname().machine


def get_triplet(arch: str) -> str:
    """Return Debian's multiarch name, such as ``aarch64-linux-gnu``."""
    return f"{arch}-linux-gnu"


def unpack(deb: Path, folder: Path, *options: str) -> None:
    """Unpack a package's files into a directory. Further arguments are options of tar.

    Raises:
        PackagesUnavailable: the package is damaged or the directory cannot be written.
    """
    # Use numeric owners, because tar would look up names in this machine's passwd.
    extract = ["tar", "-x", "-p", "-C", str(folder), "--numeric-owner", "--keep-directory-symlink", *options]
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=subprocess.PIPE) as source:
        done = subprocess.run(extract, stdin=source.stdout, stderr=subprocess.PIPE, text=True)
    if source.returncode or done.returncode:
        raise PackagesUnavailable(f"cannot unpack {deb.name}", detail=done.stderr.strip())


def find_apt() -> str:
    """Return the path of apt-get. Raises UsageError on a machine without Debian packages."""
    found = shutil.which("apt-get")
    if found is None:
        raise UsageError(
            "apt-get not found: virtual boards require Debian packages",
            hint="use a Debian machine or container",
        )
    return found


def _make_environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}


def _list_sources(release: str) -> str:
    """Return one-line apt sources of a Debian release, for the mirrors that this machine uses.

    Raises:
        UsageError: the machine has no Debian mirror.
    """
    if chosen := os.environ.get(SOURCES_VARIABLE):
        return Path(chosen).read_text()
    command = [find_apt(), "-o", "Dir::State::lists=/nonexistent", "update", "--print-uris"]
    done = subprocess.run(command, capture_output=True, text=True, env=_make_environment())
    # Use Debian's archive keys if the machine has them at this path, otherwise apt's trusted keys.
    signed = f"[signed-by={_KEYRING}] " if _KEYRING.exists() else ""
    lines = set()
    for found in _RELEASE.finditer(done.stdout):
        suite = _SUITE.match(found["suite"])
        if not suite or suite["name"] not in _DEBIAN_NAMES:
            continue
        part = "-security" if suite["part"] == "/updates" else suite["part"]
        lines.add(f"deb {signed}{found['uri']} {release}{part} main\n")
    if not lines:
        raise UsageError(
            "apt has no Debian sources: virtual boards require Debian packages",
            hint=f"set {SOURCES_VARIABLE} to a file of one-line apt sources of Debian {release}",
        )
    return "".join(sorted(lines))
