"""What runs on the board to put an agent there. Its text goes over stdin; only the standard library is there.

After the text comes one JSON line, the order, and then the packages that the order names, one after the other, each a
gzipped tar. The answer is one JSON line on stdout with a ``status``:

``ok``       the agent of that build runs and takes connections
``locked``   another deploy is at work; nothing was read
``missing``  a package is neither there nor was it sent, or the folder itself is gone: it was removed meanwhile
``busy``     the agent of another build runs, and somebody has the device; it leaves once that session ends
``failed``   with ``why`` and ``errno``, and for an agent that did not start, the end of its ``log``
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

# So long without a byte, and the sender is gone: the lock must not stay with a process that nobody feeds.
STALL_S = 30
LEAVE_S = 3.0
START_S = 90.0
LOG_TAIL = 4000
# As board_side.sh writes it.
MARKER = "hil keeps its agent here; hil board clean removes it.\n"
_PIECE = 1 << 18
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class Refused(Exception):
    """The order cannot be carried out; the arguments are the answer."""

    def __init__(self, status: str, **more: Any) -> None:
        super().__init__(status)
        self.answer = {"status": status, **more}


class Frame:
    """The next so many bytes of a stream, hashed as they come."""

    def __init__(self, stream: BufferedReader, size: int) -> None:
        self._stream = stream
        self._left = size
        self.hash = hashlib.sha256()

    def read(self, size: int = _PIECE) -> bytes:
        """At most so many bytes; b"" at the frame's end."""
        # Around the waiting alone: what comes after it, a slow card's writes, may take its time.
        signal.alarm(STALL_S)
        data = self._stream.read1(min(size, self._left))
        signal.alarm(0)
        if self._left and not data:
            raise Refused("failed", why="the link broke in the middle of a package", errno=errno.EPIPE)
        self._left -= len(data)
        self.hash.update(data)
        return data


class Place:
    """hil's folder on the board."""

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
        """Keep every other deploy, and `clean`, out until this process ends."""
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
        except FileNotFoundError as error:  # `clean` removed it meanwhile
            raise Refused("missing", packages=[]) from error
        if not self._marker.exists():  # likewise; what is there now was made above
            self._marker.write_text(MARKER)
        return file

    def running(self) -> tuple[int, str]:
        """The agent that runs: process and build; (0, "") where none does."""
        try:
            pid, build = self.pid_file.read_text().split()
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except (OSError, ValueError):
            return 0, ""
        return (int(pid), build) if {f"unix:{self.socket}", build} <= set(words) else (0, "")

    def accepts(self) -> bool:
        """Whether somebody takes connections on the socket."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)  # one that hangs, with others waiting for it, would keep us as well
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
            return True

    def write(self, path: Path, text: str) -> None:
        """Put a file there whole, or not at all."""
        temporary = self.run / f"{path.name}.new"
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)


def sync(folder: Path) -> None:
    """Have everything on the folder's file system on the disk."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(directory)
    except (AttributeError, OSError):
        os.sync()
    finally:
        os.close(directory)


def unpack(frame: Frame, folder: Path) -> None:
    """Unpack a package's files, which nobody else may read."""
    source: Any = frame
    with tarfile.open(fileobj=source, mode="r|gz") as archive:
        for member in archive:
            if not member.isreg() or member.name.startswith("/") or ".." in member.name.split("/"):
                raise Refused("failed", why=f"a package holds {member.name!r}, which is none of its files", errno=0)
            path = folder / member.name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = 0o700 if member.mode & 0o100 else 0o600
            content = archive.extractfile(member)
            assert content is not None
            with content, os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as target:
                shutil.copyfileobj(content, target, _PIECE)
    while frame.read():
        pass


def install(place: Place, stream: BufferedReader, frames: list[dict[str, Any]]) -> None:
    """Unpack the packages that come, each of which appears whole or not at all."""
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
                raise Refused("failed", why=f"package {wanted['id']} arrived damaged", errno=errno.EIO)
            sync(temporary)
            if not final.is_dir():
                temporary.rename(final)
        except (tarfile.TarError, EOFError) as error:
            raise Refused("failed", why=f"package {wanted['id']} arrived damaged: {error}", errno=errno.EIO) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    sync(place.packages)


def make_way(place: Place, build: str) -> int:
    """Have the agent of any other build leave; returns the process of one of this build that runs already, or 0."""
    pid, old = place.running()
    if pid and old != build:
        with contextlib.suppress(ProcessLookupError):  # it left by itself just now
            os.kill(pid, signal.SIGHUP)
        deadline = time.monotonic() + LEAVE_S
        while place.running()[0] == pid:
            if time.monotonic() > deadline:
                raise Refused("busy", build=old)
            time.sleep(0.05)
        pid = 0
    return pid


def start(place: Place, order: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the agent in a session of its own, with nothing of this connection in its hands."""
    for stale in (place.socket, place.pid_file):
        stale.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        place.log.replace(f"{place.log}.1")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SSH_", "PYTHON"))}
    environment["PYTHONPATH"] = ":".join(str(place.packages / name) for name in order["packages"])
    # What a library keeps for itself must not lie about in the login's home.
    environment["XDG_CACHE_HOME"] = str(place.run / "cache")
    # Threads of numpy's BLAS, a core each, which the agent has no work for, sleep at once instead of spinning.
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
        process.kill()  # nobody would ever find it
        raise
    return process


def wait_until_up(place: Place, process: subprocess.Popen[bytes] | None) -> None:
    """Wait until the agent takes connections; ``process`` where it was started just now."""
    deadline = time.monotonic() + START_S
    while not place.accepts():
        # Just after it was started it may not have its command line yet, by which others know it.
        ended = not place.running()[0] if process is None else process.poll() is not None
        if ended or time.monotonic() > deadline:
            log = place.log.read_bytes()[-LOG_TAIL:].decode(errors="replace") if place.log.exists() else ""
            last = log.strip().rpartition("\n")[2]
            why = (last or "it ended at once") if ended else f"it took no connection within {START_S:g} s"
            raise Refused("failed", why=f"the agent did not start: {why}", errno=0, log=log)
        time.sleep(0.02)


def record(place: Place, order: dict[str, Any]) -> None:
    """Note what is installed, and drop what neither this agent nor the one before it needs."""
    facts = {"recipe": order["recipe"], "python": sys.executable}
    facts.update({key: " ".join(order[key]) for key in ("runtimes", "packages")})
    place.write(place.agents / order["build"], "".join(f"{key}\t{value}\n" for key, value in facts.items()))
    place.write(place.agents / "current", f"{order['build']}\n")
    agents = [path for path in place.agents.iterdir() if path.name != "current"]
    # A board without a clock of its own may have been in the future before: this agent is the newest whatever it says.
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
    """Do what the order on the stream says; returns the answer."""
    signal.alarm(STALL_S)
    order = json.loads(stream.readline())
    signal.alarm(0)
    os.umask(0o077)
    try:
        place = Place(Path(order["folder"]))
        place.lock()
        install(place, stream, order["frames"])
        missing = [name for name in order["packages"] if not (place.packages / name).is_dir()]
        if missing:
            raise Refused("missing", packages=missing)
        process = None if make_way(place, order["build"]) else start(place, order)
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
