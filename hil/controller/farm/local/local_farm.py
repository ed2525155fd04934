"""Run a farm on this machine, from a home directory: database, gateway and a host for the boards."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import importlib.util
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from hil.controller.farm.client.client import FarmClient
from hil.controller.farm.local.processes import SupervisedProcess, end_noted, start_time
from hil.controller.farm.messages import BoardState, Role
from hil.controller.farm.oidc.oidc_settings import load_oidc
from hil.controller.farm.paths import (
    CA_VARIABLE,
    DB_VARIABLE,
    FARM_VARIABLE,
    HOME_VARIABLE,
    SHEET,
    TOKEN_VARIABLE,
    FarmAddress,
    get_socket_path,
    get_token_file,
    is_there,
    read_sheet,
)
from hil.controller.farm.settings import load_history, load_settings
from hil.controller.farm.webhooks.webhook_settings import load_webhooks
from hil.core.files import read_text, write_atomic
from hil.core.install_hints import make_install_command
from hil.core.processes import make_module_command
from hil.errors import AccessRefused, FarmError, FarmUnreachable, HilError, StorageError, UsageError
from hil.protocol.local_socket import MAX_PATH_LENGTH

# Packages of the extra `farm`, without those of the embedded database.
_PACKAGES = ("psycopg", "psycopg_pool", "procrastinate", "fsspec", "prometheus_client")
LOCK, LOGS, DATABASE = "up.lock", "logs", "postgres"


def need_packages() -> None:
    """Raise UsageError if packages for running a farm are missing. Farm clients do not need these packages."""
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise UsageError(
            f"missing packages for running a farm: {', '.join(missing)}", hint=make_install_command("farm")
        )


def prepare_home(home: Path) -> None:
    """Create a farm's home directory, accessible only to the owner.

    Raises:
        UsageError: the path is too long.
        StorageError: the directory cannot be written.
    """
    if len(os.fsencode(get_socket_path(home))) > MAX_PATH_LENGTH:
        raise UsageError(
            f"path exceeds the maximum length for a socket: {home}", hint=f"set {HOME_VARIABLE} to a shorter path"
        )
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        (home / LOGS).mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(f"{home} cannot be written: {error}") from error


def ask(home: Path, what: str, **arguments: Any) -> Any:
    """Query the farm of a home, without retries. Raises FarmUnreachable if the farm does not respond."""
    try:
        token = read_text(get_token_file(home)).strip()
    except OSError as error:
        raise FarmUnreachable(f"token not found in {home}") from error
    with FarmClient(FarmAddress((f"unix:{get_socket_path(home)}",), token), patience_s=0) as farm:
        return farm.ask(what, **arguments)


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file atomically. The permissions never exceed ``mode``.

    Raises:
        StorageError: the file cannot be written.
    """
    try:
        write_atomic(path, text, mode=mode)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}") from error


_LOOK_SECONDS = 0.25
_SERVE_SECONDS = 60.0


@dataclass(frozen=True)
class UpOptions:
    """Options of `hil farm up`; each field corresponds to the option of the same name."""

    sims: int = 0
    boards: tuple[str, ...] = ()
    site: str = ""
    db: str = ""  # PostgreSQL URL; "" uses an embedded server
    listen: str = ""  # ``HOST:PORT`` for remote users and hosts; "" for none
    # PEM files for ``listen``.
    tls_cert: Path | None = None
    tls_key: Path | None = None
    metrics: str = ""
    allow_commands: bool = False

    @property
    def count(self) -> int:
        """Expected number of boards."""
        return self.sims + len(self.boards)

    def list_host_arguments(self) -> list[str]:
        """Return the options for `hil farm host`."""
        sims = ["--sim", str(self.sims)] if self.sims else []
        site = ["--site", self.site] if self.site else []
        commands = ["--allow-commands"] if self.allow_commands else []
        return [*sims, *site, *commands, *(word for board in self.boards for word in ("--board", board))]

    def list_gateway_arguments(self) -> list[str]:
        """Return the options for `hil farm gateway`."""
        files = {"--tls-cert": self.tls_cert, "--tls-key": self.tls_key}
        named = {"--listen": self.listen, "--metrics": self.metrics}
        named |= {name: str(path.absolute()) for name, path in files.items() if path}
        return [word for name, value in named.items() if value for word in (name, value)]


class LocalFarm:
    """Farm of a home directory.

    A context manager: the farm runs inside the context, and only the data remains afterwards.

    Raises:
        FarmError: a farm of this home is already running, or it does not start.
        KeyboardInterrupt: the user stopped the farm before it could serve.
    """

    def __init__(self, home: Path, wishes: UpOptions, say: Callable[[str], None], over: threading.Event) -> None:
        self.home, self.wishes, self._say, self._over = home, wishes, say, over
        self._lock = filelock.FileLock(home / LOCK, timeout=0, thread_local=False)
        self._kept: list[SupervisedProcess] = []
        self._database: Any = None
        self._sheet = ""

    def __enter__(self) -> LocalFarm:
        need_packages()
        prepare_home(self.home)
        # Report invalid settings before anything starts.
        load_settings(self.home / "farm.toml")
        load_history(self.home / "farm.toml", "")
        load_webhooks(self.home / "farm.toml")
        load_oidc(self.home / "farm.toml")
        try:
            self._lock.acquire()
        except filelock.Timeout:
            raise FarmError(
                f"the farm in {self.home} is already running",
                hint="to stop it: hil farm down; to add a board: hil farm host --name OTHER --board NAME; "
                "to start a separate farm: set HIL_FARM_HOME",
            ) from None
        except OSError as error:
            raise StorageError(f"{self.home} cannot be written: {error}") from error
        try:
            self._start_services()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start_services(self) -> None:
        self._write_sheet(serving=False)
        for note in (self.home / LOGS).glob("*.pid"):
            end_noted(note)
        url = self.wishes.db or os.environ.get(DB_VARIABLE, "")
        if not url:
            from hil.controller.farm.database.embedded_database import EmbeddedDatabase

            self._database = EmbeddedDatabase(self.home / DATABASE)
            url = self._database.start()
            self._say(f"database  {self._database.folder}")
        self._check_stopped()
        asyncio.run(_prepare_database(url, get_token_file(self.home)))
        arguments = ["--listen", f"unix:{get_socket_path(self.home)}", *self.wishes.list_gateway_arguments()]
        gateway = self._start_process("gateway", *arguments, **{DB_VARIABLE: url})
        self._wait_until_serving(gateway)
        self._say(
            f"gateway   unix:{get_socket_path(self.home)}" + (f", {self.wishes.listen}" * bool(self.wishes.listen))
        )
        if self.wishes.count:
            self._start_process("host", *self.wishes.list_host_arguments())
        self._write_sheet(ready=not self.wishes.count)

    def _check_stopped(self) -> None:
        if self._over.is_set():
            raise KeyboardInterrupt

    def _start_process(self, name: str, *arguments: str, **more: str) -> SupervisedProcess:
        """Start and supervise a process of the farm: ``hil farm NAME ARGUMENTS``."""
        away = (FARM_VARIABLE, TOKEN_VARIABLE, CA_VARIABLE, DB_VARIABLE)
        environment = {key: value for key, value in os.environ.items() if key not in away}
        environment |= {HOME_VARIABLE: str(self.home), **more}
        command = make_module_command("hil", "farm", name, *arguments)
        kept = SupervisedProcess(name, command, environment, self.home / LOGS, self._say)
        self._kept.append(kept)
        kept.start()
        return kept

    def _wait_until_serving(self, gateway: SupervisedProcess) -> None:
        deadline = time.monotonic() + _SERVE_SECONDS
        while not get_socket_path(self.home).exists() or not self._is_serving():
            self._check_stopped()
            if gateway.pid is None or time.monotonic() > deadline:
                raise FarmError("the farm's gateway failed to start", hint=f"see {gateway.log}", detail=gateway.tail())
            time.sleep(0.05)

    def _is_serving(self) -> bool:
        with contextlib.suppress(FarmError, AccessRefused):
            ask(self.home, "boards")
            return True
        return False

    def watch(self) -> None:
        """Restart dead processes while the farm runs."""
        known: dict[str, str] = {}
        next_ask = 0.0
        while not self._over.wait(_LOOK_SECONDS):
            if self._database is not None and not self._database.is_alive():
                self._say("the database died; restarting it")
                try:
                    self._database.start()
                except HilError as error:
                    self._say(f"the database failed to start: {error.message}")
                    self._over.wait(2)
            for kept in self._kept:
                kept.check()
                if kept.usage_error:
                    with contextlib.suppress(StorageError):
                        self._write_sheet()
            if time.monotonic() >= next_ask:
                known, next_ask = self._report_boards(known), time.monotonic() + 1.0

    def _report_boards(self, known: dict[str, str]) -> dict[str, str]:
        """Report changed board states. The farm is ready when all boards have been checked."""
        if not self.wishes.count:
            return known
        try:
            now = {board.name: board.state for board in ask(self.home, "boards")}
        except HilError:
            return known
        for name, state in now.items():
            if known.get(name) != state:
                self._say(f"board     {name} {state}")
        checked = [state for state in now.values() if state not in (BoardState.SUSPECT, BoardState.OFFLINE)]
        with contextlib.suppress(StorageError):  # disk full: the farm continues
            self._write_sheet(ready=len(checked) >= self.wishes.count)
        return now

    def _write_sheet(self, *, ready: bool = False, serving: bool = True) -> None:
        sheet = {
            "pid": os.getpid(),
            "address": f"unix:{get_socket_path(self.home)}",
            "serving": serving,
            "ready": ready,
            "usage_error": next((kept.usage_error for kept in self._kept if kept.usage_error), ""),
        }
        sheet |= {"listen": self.wishes.listen, "boards": self.wishes.count}
        if (text := json.dumps(sheet) + "\n") != self._sheet:
            write_atomically(self.home / SHEET, text)
            self._sheet = text

    def stop(self) -> None:
        """Stop the farm in order: host, gateway, database."""
        (self.home / SHEET).unlink(missing_ok=True)
        for kept in reversed(self._kept):
            kept.stop()
        self._kept.clear()
        get_socket_path(self.home).unlink(missing_ok=True)
        if self._database is not None:
            self._database.stop()
            self._database = None
        self._lock.release()


async def _prepare_database(url: str, token: Path) -> None:
    """Migrate the database, and create an admin token if the stored token is missing or invalid."""
    from hil.controller.farm.database.database import Database, migrate
    from hil.controller.farm.store.access import add_token, find_principal

    await migrate(url)
    database = await Database.open(url)
    try:
        async with database.transaction() as tx:
            if token.exists() and await find_principal(tx, read_text(token).strip()) is not None:
                return
            made = await add_token(tx, getpass.getuser(), Role.ADMIN, "", "hil farm up", None)
    finally:
        await database.close()
    write_atomically(token, f"{made}\n", 0o600)


_END_S, _GONE_S = 90.0, 5.0


def end_farm(home: Path) -> bool:
    """Stop the farm of a home, and clean up leftover processes. Returns True if anything was running.

    Raises:
        FarmError: the farm does not stop.
        UsageError: the farm belongs to another user.
    """
    if not is_there(home / LOCK):
        return False
    lock = filelock.FileLock(home / LOCK, thread_local=False)
    was_up = False
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        was_up = True
        sheet = read_sheet(home)
        if sheet is None:
            raise FarmError(f"the farm in {home} is starting or stopping", hint="retry in a moment") from None
        pid = int(sheet["pid"])
        this_one = start_time(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        try:
            lock.acquire(timeout=_END_S)
        except filelock.Timeout as error:
            raise FarmError(f"the farm in {home} does not stop", hint=f"kill -9 {pid}") from error
        # The lock is released shortly before the process ends.
        deadline = time.monotonic() + _GONE_S
        while this_one and start_time(pid) == this_one and time.monotonic() < deadline:
            time.sleep(0.01)
    try:
        notes = sorted((home / LOGS).glob("*.pid"), reverse=True)
        for note in notes:
            end_noted(note)
    finally:
        lock.release()
    return was_up or bool(notes)
