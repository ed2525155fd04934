"""Install and start an agent. This script runs on the board from stdin, with the standard library only.

After the script, stdin contains the order as one JSON line, and then the packages of the order, each as a gzipped tar.
The script prints one JSON line to stdout with a ``status``:

``ok``       the agent of this build runs and accepts connections
``locked``   a deploy is already in progress; packages were not read
``missing``  a package is neither installed nor sent, or the directory was removed meanwhile
``busy``     an agent of a different build runs and the device is in use; it exits after the session
``failed``   with ``why`` and ``errno``, and the end of the ``log`` if the agent did not start
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from io import BufferedReader
from pathlib import Path
from typing import Any

# Timeout in seconds for the next byte. After this time, the sender is considered lost, and this process exits to
# release the lock.
STALL_SECONDS = 30
LEAVE_SECONDS = 3.0
START_SECONDS = 90.0
LOG_TAIL = 4000
# Same text as in board_side.sh.
MARKER = "hil keeps its agent here; hil board clean removes it.\n"
_PIECE = 1 << 18
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class Refused(Exception):
    """The order cannot be executed; the arguments form the response."""

    def __init__(self, status: str, **more: Any) -> None:
        super().__init__(status)
        self.answer = {"status": status, **more}


class Frame:
    """Reader for the next ``size`` bytes of a stream, which also hashes them."""

    def __init__(self, stream: BufferedReader, size: int) -> None:
        self._stream = stream
        self._left = size
        self.hash = hashlib.sha256()

    def read(self, size: int = _PIECE) -> bytes:
        """Read at most ``size`` bytes; b"" at the frame's end."""
        # Limit only the time for reading, because writes to a slow memory card may take long.
        signal.alarm(STALL_SECONDS)
        data = self._stream.read1(min(size, self._left))
        signal.alarm(0)
        if self._left and not data:
            raise Refused("failed", why="the connection broke while receiving a package", errno=errno.EPIPE)
        self._left -= len(data)
        self.hash.update(data)
        return data


class BoardDirectory:
    """hil's directory on the board."""

    def __init__(self, folder: Path) -> None:
        self.packages = folder / "packages"
        self.agents = folder / "agents"
        self.run = folder / "run"
        self.store = folder / "store"
        self.socket = self.run / "agent.sock"
        self.pid_file = self.run / "agent.pid"
        self.log = self.run / "agent.log"
        self._marker = folder / "hil.txt"
        if not self._marker.exists():
            raise Refused("missing", packages=[])
        for path in (folder, self.packages, self.agents, self.run, self.store):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def lock(self) -> int:
        """Lock out other deploys and `clean` until this process ends."""
        path = self.run / "deploy.lock"
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return file
                raise Refused("locked") from error
            if path.stat().st_ino != os.fstat(file).st_ino:
                raise FileNotFoundError
        except FileNotFoundError as error:  # `clean` removed the directory in the meantime
            raise Refused("missing", packages=[]) from error
        if not self._marker.exists():  # `clean` removed it; this process created the current directory
            self._marker.write_text(MARKER)
        return file

    def running(self) -> tuple[int, str]:
        """Return PID and build of the running agent, or (0, "")."""
        try:
            pid, build = self.pid_file.read_text().split()
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except (OSError, ValueError):
            return 0, ""
        return (int(pid), build) if {f"unix:{self.socket}", build} <= set(words) else (0, "")

    def accepts(self) -> bool:
        """Return whether a process accepts connections on the socket."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)  # without a timeout, connect() blocks if a hanging agent has a full backlog
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
            return True

    def write(self, path: Path, text: str) -> None:
        """Write a file atomically."""
        temporary = self.run / f"{path.name}.new"
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)


def sync(folder: Path) -> None:
    """Flush the directory's file system to the disk."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(directory)
    except (AttributeError, OSError):
        os.sync()
    finally:
        os.close(directory)


def unpack(frame: Frame, folder: Path) -> None:
    """Unpack a package's files with private permissions."""
    source: Any = frame
    with tarfile.open(fileobj=source, mode="r|gz") as archive:
        for member in archive:
            if not member.isreg() or member.name.startswith("/") or ".." in member.name.split("/"):
                raise Refused("failed", why=f"unexpected member {member.name!r} in a package", errno=0)
            path = folder / member.name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = 0o700 if member.mode & 0o100 else 0o600
            content = archive.extractfile(member)
            assert content is not None
            with content, os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as target:
                shutil.copyfileobj(content, target, _PIECE)
    while frame.read():
        pass


def install(place: BoardDirectory, stream: BufferedReader, frames: list[dict[str, Any]]) -> None:
    """Unpack the sent packages, each atomically."""
    for left in place.packages.glob(".new-*"):
        shutil.rmtree(left)
    for wanted in frames:
        final = place.packages / wanted["id"]
        temporary = place.packages / f".new-{wanted['id']}"
        frame = Frame(stream, wanted["size"])
        try:
            temporary.mkdir(mode=0o700)
            unpack(frame, temporary)
            if frame.hash.hexdigest() != wanted["sha256"]:
                raise Refused("failed", why=f"package {wanted['id']} was corrupted during upload", errno=errno.EIO)
            sync(temporary)
            if not final.is_dir():
                temporary.rename(final)
        except (tarfile.TarError, EOFError) as error:
            raise Refused(
                "failed", why=f"package {wanted['id']} was corrupted during upload: {error}", errno=errno.EIO
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    sync(place.packages)


def stop_other_agent(place: BoardDirectory, build: str) -> int:
    """Stop an agent of a different build. Return the PID of a running agent of this build, or 0."""
    pid, old = place.running()
    if pid and old != build:
        with contextlib.suppress(ProcessLookupError):  # it just exited
            os.kill(pid, signal.SIGHUP)
        deadline = time.monotonic() + LEAVE_SECONDS
        while place.running()[0] == pid:
            if time.monotonic() > deadline:
                raise Refused("busy", build=old)
            time.sleep(0.05)
        pid = 0
    return pid


def start(place: BoardDirectory, order: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the agent in a new process session, without open files of this connection."""
    for stale in (place.socket, place.pid_file):
        stale.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        place.log.replace(f"{place.log}.1")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SSH_", "PYTHON"))}
    environment["PYTHONPATH"] = ":".join(str(place.packages / name) for name in order["packages"])
    # Libraries must not write caches to the user's home directory.
    environment["XDG_CACHE_HOME"] = str(place.run / "cache")
    # Let idle threads of numpy's BLAS sleep instead of spinning. The agent does not need them.
    environment.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    argv = [sys.executable, "-m", "hil.agent", "--listen", f"unix:{place.socket}", "--store", str(place.store)]
    argv += ["--build", order["build"], *order["options"]]
    log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=place.run, env=environment, start_new_session=True
    )
    os.close(log)
    try:
        place.write(place.pid_file, f"{process.pid} {order['build']}\n")
    except BaseException:
        process.kill()  # without a PID file, later deploys would not find it
        raise
    return process


def wait_until_up(place: BoardDirectory, process: subprocess.Popen[bytes] | None) -> None:
    """Wait until the agent accepts connections. ``process`` is the new agent, or None if it already ran."""
    deadline = time.monotonic() + START_SECONDS
    while not place.accepts():
        # Do not use running() for a new process: it checks the command line, which may not be final yet.
        ended = not place.running()[0] if process is None else process.poll() is not None
        if ended or time.monotonic() > deadline:
            log = place.log.read_bytes()[-LOG_TAIL:].decode(errors="replace") if place.log.exists() else ""
            lines = log.strip().splitlines()
            # A hint may follow the agent's error line.
            last = next((line for line in reversed(lines) if line.startswith("hil.agent: ")), (lines or [""])[-1])
            why = (
                (last or "it exited immediately")
                if ended
                else f"it did not accept connections within {START_SECONDS:g} s"
            )
            raise Refused("failed", why=f"the agent did not start: {why}", errno=0, log=log)
        time.sleep(0.02)


def record(place: BoardDirectory, order: dict[str, Any]) -> None:
    """Record the installed agent, and remove files that neither this nor the previous agent needs."""
    facts = {"recipe": order["recipe"], "python": sys.executable}
    facts.update({key: " ".join(order[key]) for key in ("runtimes", "packages")})
    place.write(place.agents / order["build"], "".join(f"{key}\t{value}\n" for key, value in facts.items()))
    place.write(place.agents / "current", f"{order['build']}\n")
    agents = [path for path in place.agents.iterdir() if path.name != "current"]
    # This agent is the newest, regardless of timestamps: a board without a hardware clock may have had a time in the
    # future.
    agents.sort(key=lambda path: (path.name == order["build"], path.stat().st_mtime_ns), reverse=True)
    needed = set(order["packages"])
    for agent in agents[:2]:
        lines = (line.partition("\t") for line in agent.read_text().splitlines())
        needed.update(name for key, _, value in lines if key == "packages" for name in value.split())
    for agent in agents[2:]:
        agent.unlink()
    for package in place.packages.iterdir():
        if package.name not in needed:
            shutil.rmtree(package, ignore_errors=True)


def carry_out(stream: BufferedReader) -> dict[str, Any]:
    """Execute the order on the stream and return the response."""
    signal.alarm(STALL_SECONDS)
    order = json.loads(stream.readline())
    signal.alarm(0)
    os.umask(0o077)
    try:
        place = BoardDirectory(Path(order["folder"]))
        place.lock()
        install(place, stream, order["frames"])
        missing = [name for name in order["packages"] if not (place.packages / name).is_dir()]
        if missing:
            raise Refused("missing", packages=missing)
        process = None if stop_other_agent(place, order["build"]) else start(place, order)
        wait_until_up(place, process)
        record(place, order)
    except Refused as refused:
        return refused.answer
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return {"status": "failed", "why": f"{error.strerror}{where}", "errno": error.errno}
    return {"status": "ok", "pid": place.running()[0], "socket": str(place.socket)}


if __name__ == "__main__":
    stdin: Any = sys.stdin.buffer
    print(json.dumps(carry_out(stdin)), flush=True)
