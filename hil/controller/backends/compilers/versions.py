"""Install other versions of a compiler into hil's cache, next to the installed version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hil.controller.storage.cache import Cache
from hil.controller.storage.runs import convert_write_errors
from hil.controller.storage.screen.texts import line
from hil.core.files import read_end
from hil.core.processes import make_module_command
from hil.errors import UsageError

_INSTALL_SECONDS = 1800.0
_LOG_BYTES = 4000
_ERROR = "ERROR: "


def install_compiler(package: str, version: str, *, cache: Cache, log: Path) -> Path:
    """Return a directory with a version of a compiler's package, from the cache or installed with pip.

    The package's dependencies are not installed: the compiler uses the versions in hil's environment.

    Args:
        log: file for pip's output.

    Raises:
        UsageError: pip cannot install the version.
    """
    key = Cache.key("compiler", package=package, version=version, python=list(sys.version_info[:2]))

    def make(folder: Path) -> None:
        command = make_module_command("pip", "install", "--no-input", "--disable-pip-version-check", "--no-deps")
        command += [f"--target={folder}", f"{package}=={version}"]
        with convert_write_errors(log.parent), log.open("wb") as file:
            try:
                code = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=_INSTALL_SECONDS, check=False
                ).returncode
            except subprocess.TimeoutExpired as error:
                raise UsageError(
                    f"cannot install {package} {version}: timed out after {_INSTALL_SECONDS:g} s"
                ) from error
        if code:
            lines = read_end(log, _LOG_BYTES).strip().splitlines()
            errors = (
                [text for text in lines if text.startswith(_ERROR)] or lines or [f"pip ended with exit code {code}"]
            )
            raise UsageError(
                f"cannot install {package} {version}: {line(errors[-1].removeprefix(_ERROR))}", hint=f"see {log}"
            )

    return cache.get_or_make(key, {"package": package, "version": version}, make)[0]
