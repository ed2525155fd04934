"""Write the files of an installation, and list the next commands."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hil.controller.farm.install.containers import make_containers, name_wheel
from hil.controller.farm.install.monitoring import make_monitoring
from hil.controller.farm.install.settings import InstallPart, InstallSettings
from hil.controller.farm.install.units import ENVIRONMENT, UNITS, make_units
from hil.core.boards import BOARDS_FOLDER
from hil.core.files import write_atomic
from hil.core.installed import is_from_index
from hil.core.storage_errors import convert_os_errors
from hil.errors import UsageError

_MAKERS = {
    InstallPart.SYSTEMD: make_units,
    InstallPart.CONTAINERS: make_containers,
    InstallPart.MONITORING: make_monitoring,
}
# Environment files contain tokens and passwords.
_SECRET_SUFFIX, _SECRET_MODE, _MODE = ".env", 0o600, 0o644


def make_files(settings: InstallSettings, parts: Collection[InstallPart]) -> dict[str, str]:
    """Return path below the output directory -> content of all files."""
    chosen = [part for part in InstallPart if not parts or part in parts]
    return {f"{part.value}/{name}": text for part in chosen for name, text in _MAKERS[part](settings).items()}


def write_files(folder: Path, files: Mapping[str, str], *, force: bool) -> None:
    """Write the files of an installation.

    Raises:
        UsageError: a file exists and ``force`` is False. No file is then written.
        StorageError: the directory cannot be written.
    """
    check_existing(folder, files, force=force)
    with convert_os_errors(f"cannot write {folder}", "specify another --out"):
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text, mode=_SECRET_MODE if path.suffix == _SECRET_SUFFIX else _MODE)


def check_existing(folder: Path, files: Mapping[str, str], *, force: bool) -> None:
    """Raise UsageError if a file exists and ``force`` is False, or if a path is a directory."""
    for name in files:
        path = folder / name
        if path.is_dir() or (path.exists() and not path.is_file()):
            raise UsageError(f"{path} is not a regular file", hint="specify another --out")
        if path.exists() and not force:
            raise UsageError(
                f"{path} already exists", hint="specify another --out, or use --force to replace all files"
            )


def list_next_commands(settings: InstallSettings, files: Mapping[str, str], folder: Path) -> list[str]:
    """Return the commands that complete the installation."""
    parts = {name.partition("/")[0] for name in files}
    commands: list[str] = []
    if InstallPart.SYSTEMD.value in parts:
        commands += _list_systemd_commands(settings, folder / InstallPart.SYSTEMD.value)
    if InstallPart.CONTAINERS.value in parts:
        configs = [one for one in files if one.startswith(f"{InstallPart.CONTAINERS.value}/{BOARDS_FOLDER}/")]
        places = [(folder / one).parent for one in configs]
        commands += _list_container_commands(folder / InstallPart.CONTAINERS.value, places)
    if InstallPart.MONITORING.value in parts:
        here = shlex.quote(str(folder / InstallPart.MONITORING.value))
        commands += [
            "# monitoring: import grafana-dashboard.json in Grafana",
            f"prometheus --config.file={here}/prometheus.yaml",
        ]
    return commands


def _list_container_commands(folder: Path, configs: Sequence[Path]) -> list[str]:
    here = shlex.quote(str(folder))
    compose = f"podman compose --project-directory {here}"
    notes = [
        "# containers (or docker in place of podman)",
        *(f"# put the configs of boards in {shlex.quote(str(one))}" for one in configs),
        f"# the token of the pages is HIL_WEB_TOKEN in {here}/web.env",
    ]
    if is_from_index("hil"):
        return [*notes, f"{compose} up --build --detach"]
    return [
        *notes,
        f"# hil was not installed from a package index: copy the wheel of hil to {here} first",
        f"{compose} build --build-arg {shlex.quote(f'HIL={name_wheel()}')}",
        f"{compose} up --detach",
    ]


def list_unreadable(command: Sequence[str]) -> list[Path]:
    """Return the first directories or files of a command that other users cannot read, at most one per program.

    The interpreter of the command's virtual environment may be a link to a directory of another user.
    """
    program = Path(command[0])
    found = (_find_unreadable(one) for one in (program, program.with_name("python")) if one.is_absolute())
    return list(dict.fromkeys(one for one in found if one is not None))


def _find_unreadable(program: Path) -> Path | None:
    for one in (program, Path(os.path.realpath(program))):
        for path in [*reversed(one.parents), one]:
            try:
                mode = path.stat().st_mode
            except OSError:
                break
            # Directories need only the permission to enter.
            needed = stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IXOTH | stat.S_IROTH
            if mode & needed != needed:
                return path
    return None


def _list_systemd_commands(settings: InstallSettings, folder: Path) -> list[str]:
    here, user = shlex.quote(str(folder)), settings.user
    home = shlex.quote(str(settings.home))
    unreadable = [] if user == "root" else list_unreadable(settings.command)
    units = [name for service, name in UNITS.items() if settings.has(service)]
    if settings.backups:
        units.append("hil-farm-backup.timer")
    # Do not change the owner of an existing directory, which may have other files.
    target = shlex.quote(str(settings.backups))
    backups = [f"test -d {target} || sudo install -d -o {user} -m 700 {target}"] if settings.backups else []
    return [
        "# systemd",
        f"sudo useradd --system --home-dir {home} {user}",
        *(f"# {one} is not readable for {user}: install hil elsewhere, and use --command" for one in unreadable),
        f"sudo -u {user} {' '.join(map(shlex.quote, settings.command))} --version",
        f"sudo install -d -o {user} -m 700 {home} {shlex.quote(str(settings.runs))}",
        *backups,
        f"sudo install -D -m 600 -t {ENVIRONMENT} {here}/*.env",
        f"sudo install -m 644 -t /etc/systemd/system {here}/*.service"
        + (f" {here}/*.timer" if settings.backups else ""),
        "sudo systemctl daemon-reload",
        f"sudo systemctl enable --now {' '.join(units)}",
    ]
