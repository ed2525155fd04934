"""`hil farm install`: write the files that install a farm."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.options import FOLDER, json_option
from hil.controller.cli.screen import answer
from hil.controller.cli.usage.candidates import complete_boards
from hil.controller.records.commands.farm import InstallFiles
from hil.core.boards import is_file

_PATH = click.Path(path_type=Path)
_PARTS = ("systemd", "containers", "monitoring")
_SERVICES = ("gateway", "host", "web")


@make_command(
    epilog="""\b
Examples:
  hil farm install --out install --dry-run
  hil farm install --out install --listen 0.0.0.0:7070 --tls-cert /etc/hil/farm.pem --tls-key /etc/hil/farm.key"""
)
@click.option("--out", type=FOLDER, required=True, metavar="DIR", help="Directory for the files.")
@click.option("--only", "parts", multiple=True, type=click.Choice(_PARTS), help="Write only this part. Repeatable.")
@click.option(
    "--service",
    "services",
    multiple=True,
    type=click.Choice(_SERVICES),
    help="Service of this machine (default: all). Repeatable.",
)
@click.option("--user", default="hil", show_default=True, metavar="USER", help="System user that runs the services.")
@click.option(
    "--home", type=_PATH, default="/var/lib/hil/farm", show_default=True, metavar="DIR", help="HIL_FARM_HOME."
)
@click.option("--listen", default="", metavar="HOST:PORT", help="Address for users and hosts on other machines.")
@click.option(
    "--tls-cert",
    type=_PATH,
    metavar="PEM",
    help="Certificate for --listen and --web beyond loopback; --listen requires it.",
)
@click.option("--tls-key", type=_PATH, metavar="PEM", help="Private key of the certificate.")
@click.option(
    "--metrics", default="127.0.0.1:9107", show_default=True, metavar="HOST:PORT", help="Address of the metrics."
)
@click.option("--web", default="127.0.0.1:8790", show_default=True, metavar="HOST:PORT", help="Address of the pages.")
@click.option(
    "--gateway", default="", metavar="HOST:PORT", help="Gateway on another machine, for this host and its pages."
)
@click.option("--tls-ca", type=_PATH, metavar="PEM", help="CA of the gateway's certificate (default: --tls-cert).")
@click.option("--db", default="", metavar="URL", help="PostgreSQL URL (default: an embedded database).")
@click.option("--artifacts", default="", metavar="DIR|URL", help="File storage (default: in --home).")
@click.option("--site", default="", metavar="S", help="Location of the boards.")
@click.option(
    "--board",
    "boards",
    multiple=True,
    metavar="NAME|FILE",
    help="Board of the host. Repeatable.",
    shell_complete=complete_boards,
)
@click.option("--sim", "sims", type=click.IntRange(min=0), default=0, metavar="N", help="Simulate N boards.")
@click.option("--allow-commands", is_flag=True, help="Let users with the right `commands` run commands on the host.")
@click.option("--backups", type=_PATH, metavar="DIR", help="Also write a timer for daily backups to DIR.")
@click.option("--command", default="", metavar="PATH", help="Path of the command hil (default: this one).")
@click.option("--dry-run", is_flag=True, help="Show the files without writing them.")
@click.option("--force", is_flag=True, help="Replace existing files.")
@json_option
def install(
    out: Path, parts: tuple[str, ...], command: str, dry_run: bool, force: bool, as_json: bool, **given: Any
) -> int:
    """Write files to install a farm: systemd units, containers, and monitoring with Prometheus and Grafana.

    The command changes nothing outside --out. It prints the commands that complete the installation. Add tokens and
    passwords to the written .env files, which only you can read.
    """
    from hil.controller.farm.install.settings import InstallPart, InstallService, InstallSettings
    from hil.controller.farm.install.writer import check_existing, list_next_commands, make_files, write_files

    # The services have another working directory.
    given["boards"] = tuple(str(Path(one).absolute()) if is_file(one) else one for one in given["boards"])
    given["services"] = tuple(map(InstallService, given["services"]))
    settings = InstallSettings(command=(command,) if command else _find_command(), **given)
    files = make_files(settings, [InstallPart(part) for part in parts])
    if dry_run:
        check_existing(out, files, force=force)
    else:
        write_files(out, files, force=force)
    commands = list_next_commands(settings, files, out)
    paths = [str(out / name) for name in files]
    shown = [f"would write {path}" if dry_run else path for path in paths]
    document = InstallFiles(dry_run=dry_run, files=paths, commands=[one for one in commands if one[:1] != "#"])
    return answer(as_json, document, *shown, "", "next:", *(f"  {one}" for one in commands))


def _find_command() -> tuple[str, ...]:
    """Return the command that runs this hil. PATH may contain another one."""
    installed = Path(sys.executable).with_name("hil")
    return (str(installed),) if installed.is_file() else (sys.executable, "-m", "hil")
