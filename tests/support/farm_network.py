"""A farm on several machines, installed only with the files and commands of `hil farm install`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import hil
from hil.controller.farm.client.client import FarmClient
from hil.controller.farm.messages import Role
from hil.controller.farm.paths import SHEET, FarmAddress
from hil.controller.records.lab.farm import FarmJob
from support.certificates import write_certificate
from support.commands import Ended
from support.machines import Machine, Network
from support.units import Service
from support.waiting import eventually

HOME, COMMAND, BACKUPS = "/srv/farm", "/srv/bin/hil", "/srv/backups"
CERT, KEY = "/etc/hil/farm.pem", "/etc/hil/farm.key"
GATEWAY, PORT, WEB_PORT = "gateway", 7070, 8790
TLS = ("--tls-cert", CERT, "--tls-key", KEY)
# Long enough that a process that stops for a few seconds on a busy machine loses nothing.
SETTINGS = """
[terms]
beat_s = 0.5
lease_s = 20
owner_s = 20
quarantine_s = 2
reserve_lead_s = 1

[limits.users.anna]
boards = 1

[limits.users.bob]
queued = 3
lease_hours = 1
"""
# Programs in place of those that change users and start services.
_STUBS = {
    "sudo": 'test "$1" = -u && shift 2\nexec "$@"\n',
    "useradd": "exit 0\n",
    "systemctl": 'echo "$@" >> /srv/systemctl.log\n',
}
CURRENT = Path(hil.__file__).parents[1]


def make_next_release(folder: Path) -> Path:
    """Copy this hil as a newer release, which also has a newer database schema. Return the directory to import from."""
    copied = folder / "hil"
    shutil.copytree(CURRENT / "hil", copied)
    for name in ("board_configs", "examples/digits"):
        shutil.copytree(CURRENT / name, folder / name)
    version = copied / "core" / "__init__.py"
    version.write_text(f"{version.read_text()}\n\ndef own_version() -> str:\n    return '99.0'\n")
    (copied / "controller/farm/schema/9999_next.sql").write_text("create table hil.next_release (id int);\n")
    return folder


class FarmMachine:
    """Machine of the farm.

    Attributes:
        services: enabled services by name, in the order of their start.
    """

    def __init__(self, network: Network, name: str, release: Path = CURRENT) -> None:
        self.machine: Machine = network.add(name)
        self.name = name
        self.services: dict[str, Service] = {}
        for stub, text in _STUBS.items():
            self._write_program(f"/srv/stubs/{stub}", text)
        self.machine.path("/etc/hil").mkdir(exist_ok=True)
        self.use_release(release)

    def use_release(self, release: Path) -> None:
        """Install a release of hil. Running services continue with the release before."""
        python = f'PYTHONPATH="{release}" exec "{sys.executable}" -m hil "$@"'
        self._write_program(COMMAND, f"{python}\n")

    def install(self, *options: str) -> None:
        """Install services: run `hil farm install`, and the commands that it prints."""
        words = ["farm", "install", "--out", "/srv/install", "--only", "systemd", "--user", "root", "--home", HOME]
        document = self.hil(*words, "--command", COMMAND, *options, "--json").document
        self.machine.run("sh", "-ec", "\n".join(document["commands"]), environment=self._make_environment())
        enabled = self.machine.path("/srv/systemctl.log").read_text().split("enable --now")[1].split()
        self.services = {name: Service(self.machine, name) for name in enabled if name.endswith(".service")}
        if "hil-farm-backup.timer" in enabled:
            self.services["hil-farm-backup.service"] = Service(self.machine, "hil-farm-backup.service")

    def set_token(self, file: str, token: str) -> None:
        """Write a token to an environment file, as the comment in the file says."""
        path = self.machine.path(f"/etc/hil/{file}")
        text = path.read_text()
        assert "\nHIL_FARM_TOKEN=\n" in text
        path.write_text(text.replace("\nHIL_FARM_TOKEN=\n", f"\nHIL_FARM_TOKEN={token}\n"))

    def hil(self, *words: object, timeout_s: float = 300.0, **variables: str) -> Ended:
        """Run `hil WORDS...` on this machine."""
        done = self.machine.run(
            *(COMMAND, *map(str, words)),
            environment=self._make_environment(**variables),
            timeout_s=timeout_s,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def start_hil(self, log: Path, *words: object, **variables: str) -> subprocess.Popen[bytes]:
        """Start `hil WORDS...` on this machine. Its output is appended to a file outside the machine."""
        return self.machine.start([COMMAND, *map(str, words)], log, self._make_environment(**variables))

    def _make_environment(self, **variables: str) -> dict[str, str]:
        return {"PATH": f"/srv/stubs:{os.environ['PATH']}", "HOME": "/srv/root", "HIL_FARM_HOME": HOME, **variables}

    def _write_program(self, inside: str, text: str) -> None:
        path = self.machine.path(inside)
        path.parent.mkdir(exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(f"#!/bin/sh\n{text}")
        new.chmod(0o755)
        new.replace(path)


class GatewayMachine(FarmMachine):
    """Machine with the gateway and the database."""

    def install_gateway(self) -> None:
        self.install("--service", "gateway", "--listen", f"0.0.0.0:{PORT}", *TLS, "--backups", BACKUPS)

    @property
    def service(self) -> Service:
        return self.services["hil-farm-gateway.service"]

    def start_gateway(self) -> None:
        self.service.start()
        self.wait_until_serving()

    def wait_until_serving(self) -> None:
        def is_serving() -> bool:
            assert self.service.is_running, self.service.log()
            sheet = self.machine.path(f"{HOME}/{SHEET}")
            return sheet.exists() and json.loads(sheet.read_text())["serving"]

        eventually(is_serving, self.read_logs, 180)

    def read_logs(self) -> str:
        logs = self.machine.path(f"{HOME}/logs").glob("*.log")
        return "\n".join([self.service.log(), *(path.read_text(errors="replace")[-4000:] for path in logs)])

    def client(self) -> FarmClient:
        """Return a client with the admin's token, over the gateway's Unix socket."""
        token = self.machine.path(f"{HOME}/token").read_text().strip()
        return FarmClient(FarmAddress((f"unix:{self.machine.path(HOME)}/gateway.sock",), token), patience_s=60)

    def add_token(self, user: str, role: Role, *options: str) -> str:
        done = self.hil("farm", "token", "add", user, "--role", role.value, *options)
        assert done.code == 0, done.err
        return done.out.strip()

    def read_state(self) -> dict[str, Any]:
        """Return all that the farm has stored: jobs, results, users, reservations and events."""
        with self.client() as farm:
            jobs: list[FarmJob] = farm.ask("jobs", limit=10_000)
            names = sorted(job.name for job in jobs if job.kind != "health")
            return {
                "jobs": {name: farm.ask("job", name=name).to_json() for name in names},
                "results": {
                    name: [row.to_json() for row in farm.ask("result", name=name, specs=True)] for name in names
                },
                "tokens": [row.to_json() for row in farm.ask("tokens")],
                "reservations": [row.to_json() for row in farm.ask("reservations")],
                "events": [row.to_json() for row in farm.ask("events", limit=10_000)],
                "audit": [row.to_json() for row in farm.ask("audit", limit=10_000)],
                "settings": self.machine.path(f"{HOME}/farm.toml").read_text(),
            }


def put_certificate(folder: Path, servers: list[FarmMachine], clients: list[FarmMachine]) -> None:
    """Create a certificate, and copy it in place to the servers and clients, as a renewal hook does."""
    names = ("gateway", "desk")
    files = write_certificate(folder, "farm", hosts=names)
    for one in (*servers, *clients):
        shutil.copyfile(files.cert, one.machine.path(CERT))
    for one in servers:
        shutil.copyfile(files.key, one.machine.path(KEY))


def read_jobs(farm: FarmClient) -> dict[str, FarmJob]:
    """Return the farm's jobs without health checks, by name."""
    return {job.name: job for job in farm.ask("jobs", limit=10_000) if job.kind != "health"}
