"""hil's directory on a board without an agent: shell scripts, and parsers for their output.

``programs`` contains pushed files, named by digest; ``runs`` contains one directory per run. The scripts are POSIX sh
and use only tools that busybox has. They are constants, and all variable parts are arguments of the script. Text from a
model, a file name or a config is therefore never interpreted as shell code.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hil import errors
from hil.controller.devices.agentless.memory import MEMORY_FUNCTIONS, split_memory
from hil.core import cpuinfo
from hil.core.files import digest_file, read_text
from hil.core.memory_faults import make_memory_error
from hil.core.processes import get_signal_name
from hil.core.scratch import make_temporary_folder
from hil.formats.iree_errors import load_error

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Done, Shell

_MARK = "hil-command"
# Exit code of the probe if hil's directory cannot be created or belongs to another user.
_NO_FOLDER = 73
_MEMORY = re.compile(r"^MemTotal:\s*([0-9]{1,15}) kB", re.M)
_CORE = re.compile(r"^processor\s*:", re.M)
_CANNOT_START = (126, 127)
# Exit codes for signals: shells report signal N as 128 + N. The code 255 is not a signal but the exit code -1.
_SIGNALS = range(129, 129 + 64)
DETAIL = 4000
_SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,8}")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_FOLDER = re.compile(r"/[^\0]*")
_CALL_S, _CHECK_S = 60.0, 120.0
# Remove programs that were unused for a month. On a full disk, remove programs unused for an hour, then for 5 minutes.
_PRUNE_MINUTES, _FULL_PRUNE_MINUTES = 30 * 24 * 60, (60, 5)
_SPARE_BYTES, _INPUTS_SPARE_BYTES = 1 << 20, 1 << 16
# Extra seconds to wait for the response before the board is considered lost, and a factor for slow boards. The script
# counts seconds with ``sleep``, which takes longer on slow boards (7 % longer under emulation).
_GRACE_S, _SLOW = 15.0, 1.25
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# iree-run-module and its forks print this after loading the program and reading inputs.
_BEGUN = re.compile(r"^EXEC @", re.M)
_OF_IREE = re.compile(r"^(?:\S+\.\w+|<vm>):\d+: ([A-Z_]+); ", re.M)
# Each script's file describes its arguments.
_LOOK, _PROBE, _HAVE, _ROOM, _RUN = (
    read_text(Path(__file__).with_name(f"{name}.sh")) for name in ("look", "probe", "have", "room", "run")
)


@dataclass(frozen=True)
class Item:
    """File to install on the board, named by digest."""

    path: Path
    digest: str
    executable: bool = False

    @property
    def name(self) -> str:
        """Name on the board: the digest, plus the file name of an executable or a harmless suffix."""
        digest = self.digest.replace(":", "-")
        if self.executable:
            return f"{digest}-{re.sub(_UNSAFE, '_', self.path.name)}"
        return digest + (self.path.suffix if _SUFFIX.fullmatch(self.path.suffix) else "")

    def is_same(self, found: tuple[int, str] | None) -> bool:
        """Return whether size and SHA-256 match. An empty SHA-256 means that the board cannot compute it."""
        if found is None or found[0] != self.path.stat().st_size:
            return False
        return not found[1] or digest_file(self.path, "sha256") == f"sha256:{found[1]}"


class BoardStore:
    """hil's directory on the board. After :meth:`open`, ``folder`` is the absolute path."""

    def __init__(self, shell: Shell) -> None:
        self.folder = ""
        self._shell = shell

    def open(self, folder: str) -> dict[str, str]:
        """Create the config's directory on the board. Return the machine's description: part -> text.

        Raises:
            BoardUnfit: The directory cannot be used.
            BoardError: The shell is not POSIX.
        """
        done = self._run_script(_LOOK + _PROBE, folder, timeout=_CALL_S)
        found = split_parts(done.out.decode(errors="replace"))
        if done.code == _NO_FOLDER:
            why = _find_first_line(done.err) or "it belongs to a different user"
            raise errors.BoardUnfit(
                f"cannot create hil's directory {folder or '.hil'} on the board: {why}",
                hint="set a different directory in the board's config: [connection] folder",
                detail=done.err[-DETAIL:],
            )
        complete = {"board_id", "readings", "folder", "end"} <= found.keys()
        if done.code or not complete or not _FOLDER.fullmatch(found["folder"]):
            raise self._make_shell_error(done)
        self.folder = found["folder"]
        return found

    def read_state(self) -> dict[str, str]:
        """Return the state that may have changed since :meth:`open`, with the same parts."""
        end = "part readings; readings; part boot_id; cat /proc/sys/kernel/random/boot_id; part end"
        return split_parts(self._run_script(_LOOK + end, timeout=_CALL_S).out.decode(errors="replace"))

    def _run_script(self, script: str, *arguments: str, timeout: float = _CHECK_S) -> Done:
        return self._shell.run(["sh", "-c", script, "hil", *arguments], timeout=timeout, check=False)

    def _make_shell_error(self, done: Done) -> errors.BoardError:
        return errors.BoardError(
            "the board's login shell is not POSIX-compatible",
            hint="use a POSIX login shell and /bin/sh, as on Linux; busybox works",
            detail=f"{done.text[-DETAIL:]}\n{done.err[-DETAIL:]}",
        )

    def find(self, program: str) -> str:
        """Return the path of the config's program on the board. Raises BoardUnfit if the program is missing."""
        done = self._run_script('command -v -- "$1"', program)
        if done.code or not done.text:
            raise errors.BoardUnfit(
                f"program {program!r} not found on the board",
                hint="install the program in the login's PATH, or correct [runtime] program in the board's config",
            )
        return done.text

    def place(self, item: Item) -> str:
        """Return the remote path of a file."""
        return f"{self.folder}/programs/{item.name}"

    def missing(self, items: Sequence[Item]) -> list[Item]:
        """Return the files that are missing or different on the board.

        Mark files that are already on the board as used now.
        """
        if not items:
            return []
        done = self._run_script(_HAVE, *map(self.place, items))
        if done.code:
            raise errors.BoardUnfit(
                "the board cannot read a file that hil uploaded",
                hint=f"inspect {self.folder}, or remove it: hil board clean",
                detail=done.err[-DETAIL:],
            )
        try:
            found = _parse_sizes_and_sums(done.out.decode(errors="replace"))
            return [item for item, one in zip(items, found, strict=True) if not item.is_same(one)]
        except ValueError as error:
            raise self._make_shell_error(done) from error

    def put(self, items: Sequence[Item], progress: Callable[[int], None]) -> None:
        """Send complete files and verify them."""
        self.make_room(sum(item.path.stat().st_size for item in items))
        for item in items:
            try:
                mode = 0o700 if item.executable else 0o600
                self._shell.put(item.path, self.place(item), mode=mode, progress=progress)
            except errors.BoardLost:
                raise
            except errors.BoardError as error:
                self.make_room(item.path.stat().st_size)
                raise _make_unwritable_error(self.folder, error) from error
        if damaged := self.missing(items):
            raise errors.BoardLost(f"{damaged[0].path.name} was corrupted during upload", stage="push")

    def make_room(self, size: int) -> None:
        """Remove long unused files. Remove more recent files if ``size`` bytes do not fit."""
        for minutes in (_PRUNE_MINUTES, *_FULL_PRUNE_MINUTES):
            free = self.free_bytes(minutes)
            if free is None or free >= size + _SPARE_BYTES:
                return
        raise errors.BoardUnfit(
            f"not enough disk space in {self.folder} on the board: "
            f"the program needs {size} bytes, but only {free} are free",
            hint="remove files on the board, or set a directory on a different disk: "
            "[connection] folder in the board's config",
        )

    def free_bytes(self, minutes: int) -> int | None:
        """Remove programs unused for ``minutes``. Return the free bytes after that, or None if unknown."""
        return free_bytes(self._run_script(_ROOM, self.folder, str(minutes)).text)

    @contextlib.contextmanager
    def run_folder(self) -> Iterator[RunFolder]:
        """Provide a local and a remote directory for a run. Both are removed at the end."""
        remote = f"{self.folder}/runs/{secrets.token_hex(8)}"
        with make_temporary_folder("hil-command-") as local:
            try:
                yield RunFolder(Path(local), remote, self._shell, self)
            finally:
                with contextlib.suppress(errors.BoardError):
                    self._shell.run(["rm", "-rf", "--", remote], timeout=_CALL_S, check=False)


@dataclass(frozen=True)
class RunFolder:
    """Directory of a run, ``local`` on this machine and ``remote`` on the board."""

    local: Path
    remote: str
    _shell: Shell
    _store: BoardStore

    def send(self, files: Sequence[str]) -> None:
        """Create the remote directory and send input files from the local directory."""
        size = sum((self.local / name).stat().st_size for name in files)
        try:
            self._shell.run(["mkdir", "-m", "700", self.remote], timeout=_CALL_S)
            for name in files:
                self._shell.put(self.local / name, f"{self.remote}/{name}")
        except errors.BoardLost:
            raise
        except errors.BoardError as error:
            free = self._store.free_bytes(_PRUNE_MINUTES)
            if free is None or free > size + _INPUTS_SPARE_BYTES:
                raise _make_unwritable_error(self._store.folder, error) from error
            raise errors.BoardUnfit(
                f"not enough disk space in {self._store.folder} on the board: "
                f"the inputs need {size} bytes, but only {free} are free",
                hint="remove files on the board, or set a directory on a different disk: "
                "[connection] folder in the board's config",
            ) from error

    def command(
        self, argv: Sequence[str], files: Sequence[str], *, limit_s: int, wait_s: int, environment: Mapping[str, str]
    ) -> tuple[CommandEnd, str, float]:
        """Run a command (see :func:`run`). Return how the command ended, stderr, and wall time in seconds."""
        whole = run(self.remote, files, argv, limit_s=limit_s, wait_s=wait_s, environment=environment)
        start = time.monotonic()
        try:
            done = self._shell.run(whole, timeout=(limit_s + wait_s) * _SLOW + _GRACE_S, check=False)
        except errors.BoardLost as error:  # the message contains the script
            what = "the connection broke or the board hung during the run"
            raise errors.BoardLost(what, detail=error.message) from error
        wall = time.monotonic() - start
        end = parse_end(done.out.decode(errors="replace"))
        if end is None or end.how == "gone":
            raise errors.BoardLost("the board ended the run without a result", detail=done.err[-DETAIL:])
        return end, done.err, wall

    def get(self, file: str, size: int) -> Path:
        """Fetch an output file of ``size`` bytes."""
        local = self.local / file
        self._shell.get(f"{self.remote}/{file}", local, size)
        if local.stat().st_size != size:
            raise errors.BoardLost(f"{file} was corrupted during download")
        return local


def _make_unwritable_error(folder: str, error: errors.BoardError) -> errors.BoardUnfit:
    return errors.BoardUnfit(
        f"the board cannot write to {folder}: {error.message}",
        hint="check for a read-only file system (mount, dmesg), and the owner of the directory",
        detail=error.detail,
    )


# ---- parsers for the scripts' output


def split_parts(text: str) -> dict[str, str]:
    """Split the output of a script into parts, and return title -> text."""
    pieces = re.split(r"^hil-command (\w+)\n", text, flags=re.M)
    return {name: body.strip("\n") for name, body in zip(pieces[1::2], pieces[2::2], strict=True)}


def _parse_sizes_and_sums(text: str) -> list[tuple[int, str] | None]:
    """Parse size and SHA-256 of every file. SHA-256 is "" if the board cannot compute it. A missing file is None."""
    lines = [line.partition(" ") for line in text.splitlines()]
    return [None if size == "-" else (_parse_int(size), digest) for size, _, digest in lines]


def free_bytes(text: str) -> int | None:
    """Return the free bytes from ``df -Pk`` output, or None if it has no such line."""
    match = re.search(r"\s[0-9]+\s+[0-9]+\s+([0-9]{1,15})\s+[0-9]+%", text)
    return int(match[1]) * 1024 if match else None


@dataclass(frozen=True)
class CommandEnd:
    """End of a command on the board."""

    # ``exit`` (see ``code``), ``late`` (time limit exceeded), ``busy`` (another run uses the board) or ``gone`` (the
    # run's directory was removed).
    how: str
    code: int  # exit code; 128 + N for signal N
    waited_s: int  # time in seconds spent waiting for another run
    sizes: tuple[int | None, ...]  # size of each output file in bytes; None if missing
    out: str  # end of stdout
    # After an OOM kill: the board's total and available memory in bytes.
    memory: tuple[int, int] | None = None


def run(
    folder: str,
    outputs: Sequence[str],
    argv: Sequence[str],
    *,
    limit_s: int,
    wait_s: int,
    environment: Mapping[str, str],
) -> list[str]:
    """Return the command that runs a program in its run's directory. Parse the output with :func:`parse_end`.

    The program writes ``outputs`` to the run's directory. The command waits up to ``wait_s`` seconds while another run
    uses the board, and kills the program after ``limit_s`` seconds. Both times are whole seconds.
    """
    assert PurePosixPath(folder).is_absolute()
    assignments = [f"{name}={value}" for name, value in environment.items()]
    whole = ["env", *assignments, *argv] if assignments else list(argv)
    return ["sh", "-c", MEMORY_FUNCTIONS + _RUN, "hil-run", str(limit_s), str(wait_s), folder, *outputs, "--", *whole]


def parse_end(text: str) -> CommandEnd | None:
    """Parse the output of :func:`run`. Return None if the end is missing."""
    lines = text.split("\n")
    while lines and lines[0] == ".":
        lines.pop(0)
    found, lines = split_memory(lines)
    head = lines[0].split(" ") if lines else []
    if head in ([_MARK, "busy"], [_MARK, "gone"]):
        return CommandEnd(head[1], 0, 0, (), "")
    if len(head) != 3 or head[0] != _MARK or _MARK not in lines[1:]:
        return None
    end = lines.index(_MARK, 1)
    out = "\n".join(lines[end + 1 :])
    late = head[1] == "late"
    try:
        sizes = tuple(None if line.strip() == "-" else _parse_int(line.strip()) for line in lines[1:end])
        return CommandEnd(
            "late" if late else "exit", 0 if late else _parse_int(head[1]), _parse_int(head[2]), sizes, out, found
        )
    except ValueError:
        return None


def _parse_int(text: str) -> int:
    """Parse a decimal integer of at most 15 digits. Raises ValueError otherwise."""
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise ValueError(f"not a number: {text[:40]!r}")
    return int(text)


# ---- description of the board


def parse_machine(parts: Mapping[str, str]) -> dict[str, Any]:
    """Return CPU, memory and system from the output of the probe script. Empty values are omitted."""
    arch = parts.get("arch", "")
    shown = parts.get("cpuinfo", "")
    cpu = cpuinfo.parse_cpu_info(arch, shown, _parse_bytes(parts.get("auxv", "")))
    memory = _MEMORY.search(parts.get("meminfo", ""))
    found: dict[str, Any] = {
        "hostname": parts.get("hostname", ""),
        "system": parts.get("system", ""),
        "kernel": parts.get("kernel", ""),
        "arch": arch,
        "libc": parts.get("libc", ""),
        "cpu_model": cpu.model,
        "cpu_features": list(cpu.features),
        "cpu_parts": list(cpu.parts),
        "cores": len(_CORE.findall(shown)),
        "memory_bytes": str(int(memory[1]) * 1024) if memory else "",
        "boot_id": parts.get("boot_id", ""),
    }
    return {key: value for key, value in found.items() if value}


def _parse_bytes(dump: str) -> bytes:
    """Parse the output of ``od -An -tx1``. Return b"" if the board has no such tool."""
    try:
        return bytes.fromhex("".join(dump.split()))
    except ValueError:
        return b""


def parse_readings(text: str) -> list[dict[str, Any]]:
    """Return readings with the agent's names from ``FILE:VALUE`` lines."""
    values = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return list(cpuinfo.get_readings({file: values[file] for file in sorted(values, key=_make_natural_key)}))


def _make_natural_key(text: str) -> list[Any]:
    return [int(piece) if number % 2 else piece for number, piece in enumerate(re.split(r"([0-9]{1,15})", text))]


# ---- errors of failed commands


def make_failure(ended: CommandEnd, err: str, program: str, *, loads: bool = False) -> errors.HilError:
    """Return the error for a command's nonzero exit code.

    ``loads`` means that the program is known to load on the board, so an IREE error means that the run failed.
    """
    stderr = _COLOUR.sub("", err).strip()
    detail = stderr[-DETAIL:]
    name = posixpath.basename(program)
    if ended.code in _CANNOT_START and not _OF_IREE.search(stderr):
        return errors.BoardUnfit(
            f"the board cannot start the command {name}: {_find_first_line(stderr) or f'exit code {ended.code}'}",
            stage="load",
            hint="the program or a required library (glibc, libstdc++) is missing or built for a different CPU, "
            "or the directory is mounted noexec",
            detail=detail,
        )
    if ended.memory is not None:
        total, freed = ended.memory
        # The memory that is available after the kill was also available to the program.
        error = make_memory_error(freed, total)
        error.detail = detail
        return error
    if ended.code in _SIGNALS:
        return _make_crash_error(ended.code - 128, name, detail)
    if _OF_IREE.search(stderr) and not loads and not _BEGUN.search(ended.out):
        error = load_error(f"IREE rejected the program: {_find_first_line(stderr)}", stderr, detail=detail)
        if not error.hint and "no driver" in stderr:
            error.hint = "use a device that the command supports: [devices] in the board's config"
        return error.locate(stage="load")
    return errors.RunFailed(
        f"{name} failed with exit code {ended.code}: {_find_first_line(stderr)}".rstrip(": "), detail=detail
    )


def _make_crash_error(number: int, name: str, detail: str) -> errors.HilError:
    hint, code = "", errors.ErrorCode.NONE
    if number == signal.SIGKILL:
        hint = "hil did not send the signal: the board may have run out of memory"
    elif number == signal.SIGILL:
        hint = "the program uses instructions this CPU lacks: check the compile target"
        code = errors.ErrorCode.ILLEGAL_INSTRUCTION
    message = f"{name} was killed by {get_signal_name(number)} during run"
    return errors.RunCrashed(message, hint=hint, detail=detail, code=code)


def _find_first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    best = next((line for line in lines if _OF_IREE.match(line)), lines[0] if lines else "")
    return best[:400]
