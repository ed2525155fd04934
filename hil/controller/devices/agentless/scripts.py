"""hil's folder on a board without an agent: what the board's own shell does there, and what its answers mean.

Programs lie in ``programs``, named by their content and pushed once, and each run has a folder in ``runs``. The scripts
are POSIX sh, with the tools that busybox has too. Their texts are constants. Whatever varies is an argument of the
script, so nothing that comes from a model, a file name or a config is ever read as shell.
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
from hil.core import cpuinfo
from hil.core.digest import digest_file
from hil.core.processes import signal_name
from hil.core.scratch import temporary_folder

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Done, Shell

_MARK = "hil-command"
# What the probe ends with where it cannot make hil's folder, or somebody else made it.
_NO_FOLDER = 73
_MEMORY = re.compile(r"^MemTotal:\s*([0-9]{1,15}) kB", re.M)
_CORE = re.compile(r"^processor\s*:", re.M)
_CANNOT_START = (126, 127)
# A shell adds the signal's number to 128; a program that ends with -1 has the code 255, and crashed of nothing.
_SIGNALS = range(129, 129 + 64)
DETAIL = 4000
_SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,8}")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_FOLDER = re.compile(r"/[^\0]*")
_CALL_S, _CHECK_S = 60.0, 120.0
# On a full disk, programs that nobody has used for an hour make room; else those of a month ago go.
_PRUNE_MINUTES, _FULL_PRUNE_MINUTES = 30 * 24 * 60, 60
_SPARE_BYTES, _INPUTS_SPARE_BYTES = 1 << 20, 1 << 16
# Past its limit the board's side should have answered; then the board itself is given up. It counts seconds by
# sleeping, and a slow board is late at each: 7 % where it is emulated.
_GRACE_S, _SLOW = 15.0, 1.25
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# iree-run-module and its forks say this once the program is loaded and its inputs are read.
_BEGUN = re.compile(r"^EXEC @", re.M)
_OF_IREE = re.compile(r"^(?:\S+\.\w+|<vm>):\d+: ([A-Z_]+); ", re.M)

# Functions for the two scripts below: a part's title, and FILE:VALUE of all that may change while a program runs.
_LOOK = """
part() { printf '\\nhil-command %s\\n' "$1"; }
readings() (
  cd /sys/devices/system/cpu 2>/dev/null &&
    grep -Hs . cpufreq/policy*/scaling_cur_freq cpufreq/policy*/scaling_max_freq cpufreq/policy*/scaling_governor \\
      cpu[0-9]*/thermal_throttle/*_throttle_count
  cd /sys/class/thermal 2>/dev/null &&
    grep -Hs . thermal_zone*/type thermal_zone*/temp cooling_device*/type cooling_device*/cur_state
  grep -Hs . /sys/devices/platform/soc*/soc*firmware/get_throttled | sed 's/.*get_throttled:/get_throttled:/'
  grep -Hs ^MemAvailable: /proc/meminfo
)
"""

# FOLDER -> makes hil's folder (as the config names it) and tells of the machine, each part under a line of its own.
_PROBE = """
umask 077
LC_ALL=C; export LC_ALL
case $1 in
'') set -- "${HOME:-/}/.hil/command" ;;
'~/'*) set -- "${HOME:-/}/${1#'~/'}/command" ;;
/*) set -- "$1/command" ;;
*) set -- "${HOME:-/}/$1/command" ;;
esac
[ ! -L "$1" ] && mkdir -p -- "$1/programs" "$1/runs" && [ -O "$1" ] || exit 73
chmod 700 "$1" "$1/programs" "$1/runs" && cd -- "$1" || exit 73
part folder; pwd -P
part system; uname -s
part hostname; uname -n
part kernel; uname -r
part arch; uname -m
part libc; getconf GNU_LIBC_VERSION 2>/dev/null || ldd --version 2>&1 | sed -n 's/^ldd .* /glibc /p;s/^musl .*/musl/p'
part cpuinfo; cat /proc/cpuinfo 2>/dev/null
part auxv; od -An -v -tx1 /proc/self/auxv 2>/dev/null
part meminfo; cat /proc/meminfo 2>/dev/null
part board_id; cat /etc/machine-id 2>/dev/null
part readings; readings
part boot_id; cat /proc/sys/kernel/random/boot_id 2>/dev/null
part end
for run in runs/*; do
  [ -d "$run" ] && [ -n "$(find "$run" -prune -mtime +0 2>/dev/null)" ] && rm -rf -- "$run"
done
exit 0
"""

# FILE... -> a line for each: its size and SHA-256, or "-" where there is none. What is used is made younger.
_HAVE = """
for file do
  if [ -f "$file" ]; then
    touch -- "$file"
    size=$(wc -c <"$file") || exit 1
    sum=$(sha256sum <"$file" 2>/dev/null)
    echo "$((size)) ${sum%% *}"
  else
    echo -
  fi
done
"""

# FOLDER MINUTES -> removes programs that were not used for so long; then what `df` says of the folder.
_ROOM = """
find "$1/programs" -type f -mmin "+$2" -exec rm -f -- {} \\; 2>/dev/null
df -Pk -- "$1" 2>/dev/null || df -k "$1"
"""

# LIMIT_S WAIT_S FOLDER OUTPUT... -- PROGRAM ARGUMENT...
# The program is the head of a process group of its own, which ends at the limit, or as soon as nobody listens any more:
# a sign of life is written every second, and fails once the link is gone. One run at a time: the folder of all runs is
# locked, by the program, for as long as it lives.
_RUN = """
umask 077
ulimit -c 0 2>/dev/null
limit=$1 patience=$2 run=$3 waited=0; shift 3
cd -- "$run" || { echo hil-command gone; exit 0; }
outputs=0; for one do [ "$one" = -- ] && break; outputs=$((outputs + 1)); done
rm -f -- o[0-9]* out err late
if command -v flock >/dev/null 2>&1; then
  exec 9<..
  until flock -n 9; do
    [ "$waited" -lt "$patience" ] || { echo hil-command busy; exit 0; }
    waited=$((waited + 1))
    sleep 1
    echo .
  done
fi
start() {
  while [ "$1" != -- ]; do shift; done
  shift
  if command -v setsid >/dev/null 2>&1; then exec setsid "$@"; fi
  exec "$@"
}
start "$@" </dev/null >out 2>err &
tool=$!
trap '' PIPE HUP
(
  exec 9>&-
  end() { kill -9 "-$tool" 2>/dev/null || kill -9 "$tool" 2>/dev/null; }
  while kill -0 "$tool" 2>/dev/null; do
    [ "$limit" -gt 0 ] || { : >late; end; break; }
    sleep 1 >/dev/null 2>&1
    limit=$((limit - 1))
    echo . 2>/dev/null || { end; break; }
  done
) &
watch=$!
wait "$tool" 2>/dev/null
code=$?
kill "$watch" 2>/dev/null
wait "$watch" 2>/dev/null
[ -e late ] && code=late
echo "hil-command $code $waited" 2>/dev/null || { cd ..; rm -rf -- "$run"; exit 1; }
while [ "$outputs" -gt 0 ]; do
  if [ -f "$1" ]; then wc -c <"$1"; else echo -; fi
  outputs=$((outputs - 1)); shift
done
echo hil-command
tail -c 65536 out
tail -c 65536 err >&2
exit 0
"""


@dataclass(frozen=True)
class Item:
    """A file that the board is to have, named there by its digest."""

    path: Path
    digest: str
    executable: bool = False

    @property
    def name(self) -> str:
        """Its name on the board: digest and, where it is harmless, what people and tools go by."""
        digest = self.digest.replace(":", "-")
        if self.executable:
            return f"{digest}-{re.sub(_UNSAFE, '_', self.path.name)}"
        return digest + (self.path.suffix if _SUFFIX.fullmatch(self.path.suffix) else "")

    def is_same(self, found: tuple[int, str] | None) -> bool:
        """Whether that is its size and SHA-256; "" is that of a board without a tool for it."""
        if found is None or found[0] != self.path.stat().st_size:
            return False
        return not found[1] or digest_file(self.path, "sha256") == f"sha256:{found[1]}"


class Store:
    """hil's folder on the board: ``folder``, absolute, once it is :meth:`open`."""

    def __init__(self, shell: Shell) -> None:
        self.folder = ""
        self._shell = shell

    def open(self, folder: str) -> dict[str, str]:
        """Make the folder, as the config names it; returns what the machine shows of itself, part -> its text.

        Raises:
            BoardError: it cannot be used, or the shell is not POSIX.
        """
        done = self._script(_LOOK + _PROBE, folder, timeout=_CALL_S)
        found = parts(done.out.decode(errors="replace"))
        if done.code == _NO_FOLDER:
            raise errors.BoardError(
                f"hil's folder {folder or '.hil'} cannot be made on the board, or is somebody else's",
                hint="name another one in the board's config: [connection] folder",
                detail=done.err[-DETAIL:],
            )
        complete = {"board_id", "readings", "folder", "end"} <= found.keys()
        if done.code or not complete or not _FOLDER.fullmatch(found["folder"]):
            raise self._not_posix(done)
        self.folder = found["folder"]
        return found

    def look(self) -> dict[str, str]:
        """What may have changed since :meth:`open`, with the same parts."""
        end = "part readings; readings; part boot_id; cat /proc/sys/kernel/random/boot_id; part end"
        return parts(self._script(_LOOK + end, timeout=_CALL_S).out.decode(errors="replace"))

    def _script(self, script: str, *arguments: str, timeout: float = _CHECK_S) -> Done:
        return self._shell.run(["sh", "-c", script, "hil", *arguments], timeout=timeout, check=False)

    def _not_posix(self, done: Done) -> errors.BoardError:
        return errors.BoardError(
            "the board's shell does not do what a POSIX shell does",
            hint="a login shell and /bin/sh as on Linux are needed, busybox's will do",
            detail=f"{done.text[-DETAIL:]}\n{done.err[-DETAIL:]}",
        )

    def find(self, program: str) -> str:
        """Where a program that the config names lies on the board."""
        done = self._script('command -v -- "$1"', program)
        if done.code or not done.text:
            raise errors.LoadFailed(
                f"the board has no program {program!r}",
                hint="[runtime] program in the board's config is looked for in the login's PATH there",
            )
        return done.text

    def place(self, item: Item) -> str:
        """Where a file lies on the board."""
        return f"{self.folder}/programs/{item.name}"

    def missing(self, items: Sequence[Item]) -> list[Item]:
        """The files that the board does not have as they are here. Those that it has count as used just now."""
        if not items:
            return []
        done = self._script(_HAVE, *map(self.place, items))
        if done.code:
            raise errors.BoardError(
                "the board cannot read a file that hil put there",
                hint=f"see what {self.folder} holds, or remove it: hil board clean",
                detail=done.err[-DETAIL:],
            )
        try:
            found = _sizes_and_sums(done.out.decode(errors="replace"))
            return [item for item, one in zip(items, found, strict=True) if not item.is_same(one)]
        except ValueError as error:
            raise self._not_posix(done) from error

    def put(self, items: Sequence[Item], progress: Callable[[int], None]) -> None:
        """Send files whole, and verify them."""
        self.make_room(sum(item.path.stat().st_size for item in items))
        for item in items:
            try:
                mode = 0o700 if item.executable else 0o600
                self._shell.put(item.path, self.place(item), mode=mode, progress=progress)
            except errors.BoardLost:
                raise
            except errors.BoardError:
                self.make_room(item.path.stat().st_size)
                raise
        if damaged := self.missing(items):
            raise errors.BoardLost(f"{damaged[0].path.name} was damaged on its way to the board", stage="push")

    def make_room(self, size: int) -> None:
        """Remove what has long not been used, and more of it where ``size`` bytes do not fit."""
        for minutes in (_PRUNE_MINUTES, _FULL_PRUNE_MINUTES):
            free = self.free_bytes(minutes)
            if free is None or free >= size + _SPARE_BYTES:
                return
        raise errors.LoadFailed(
            f"the board has no room for the program: {size} bytes, and {free} are free",
            hint=f"make room on the board's disk, or set connection.folder to another place than {self.folder}",
        )

    def free_bytes(self, minutes: int) -> int | None:
        """Remove programs not used for so many minutes; how many bytes are free then, None where nobody tells."""
        return free_bytes(self._script(_ROOM, self.folder, str(minutes)).text)

    @contextlib.contextmanager
    def run_folder(self) -> Iterator[RunFolder]:
        """A folder for a run, here and on the board; both are gone at the end."""
        remote = f"{self.folder}/runs/{secrets.token_hex(8)}"
        with temporary_folder("hil-command-") as local:
            try:
                yield RunFolder(Path(local), remote, self._shell, self)
            finally:
                with contextlib.suppress(errors.BoardError):
                    self._shell.run(["rm", "-rf", "--", remote], timeout=_CALL_S, check=False)


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, ``local`` here and ``remote`` on the board."""

    local: Path
    remote: str
    _shell: Shell
    _store: Store

    def send(self, files: Sequence[str]) -> None:
        """Make the folder on the board, with inputs in it that lie in the local one."""
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
                raise
            what = f"the board has no room for the inputs: {size} bytes, and {free} are free"
            raise errors.RunFailed(what) from error

    def command(
        self, argv: Sequence[str], files: Sequence[str], *, limit_s: int, wait_s: int, environment: Mapping[str, str]
    ) -> tuple[Ended, str, float]:
        """Run a command as :func:`run` does; returns its end, what it wrote to stderr, and its wall time in seconds."""
        whole = run(self.remote, files, argv, limit_s=limit_s, wait_s=wait_s, environment=environment)
        start = time.monotonic()
        try:
            done = self._shell.run(whole, timeout=(limit_s + wait_s) * _SLOW + _GRACE_S, check=False)
        except errors.BoardLost as error:  # its own message shows the script
            what = "the link broke or the board hung during the run"
            raise errors.BoardLost(what, detail=error.message) from error
        wall = time.monotonic() - start
        end = ended(done.out.decode(errors="replace"))
        if end is None or end.how == "gone":
            raise errors.BoardLost("the board ended the run without an answer", detail=done.err[-DETAIL:])
        return end, done.err, wall

    def get(self, file: str, size: int) -> Path:
        """Fetch a file that a command wrote, of so many bytes."""
        local = self.local / file
        self._shell.get(f"{self.remote}/{file}", local, size)
        if local.stat().st_size != size:
            raise errors.BoardLost(f"{file} was damaged on its way from the board")
        return local


# ---- what the scripts print


def parts(text: str) -> dict[str, str]:
    """Part -> its text."""
    pieces = re.split(r"^hil-command (\w+)\n", text, flags=re.M)
    return {name: body.strip("\n") for name, body in zip(pieces[1::2], pieces[2::2], strict=True)}


def _sizes_and_sums(text: str) -> list[tuple[int, str] | None]:
    """Size and SHA-256 ("" where the board has no tool for it) of each file, None where there is none."""
    lines = [line.partition(" ") for line in text.splitlines()]
    return [None if size == "-" else (_whole(size), digest) for size, _, digest in lines]


def free_bytes(text: str) -> int | None:
    """What ``df -Pk`` says is free, in bytes; None where it says nothing."""
    match = re.search(r"\s[0-9]+\s+[0-9]+\s+([0-9]{1,15})\s+[0-9]+%", text)
    return int(match[1]) * 1024 if match else None


@dataclass(frozen=True)
class Ended:
    """How a command ended on the board."""

    # ``exit`` (see ``code``), ``late`` (it outlived its limit), ``busy`` (another run holds the board) or ``gone`` (the
    # run's folder is no more).
    how: str
    code: int  # its exit code, 128 and more where a signal ended it
    waited_s: int  # how long it waited for another run to end
    sizes: tuple[int | None, ...]  # of each output file in bytes, None where it wrote none
    out: str  # the end of what it printed


def run(
    folder: str,
    outputs: Sequence[str],
    argv: Sequence[str],
    *,
    limit_s: int,
    wait_s: int,
    environment: Mapping[str, str],
) -> list[str]:
    """The command that runs a program in a folder of its run; read its output with :func:`ended`.

    It writes ``outputs`` there. It is killed after ``limit_s`` whole seconds, and waits ``wait_s`` while another run
    holds the board.
    """
    assert PurePosixPath(folder).is_absolute()
    assignments = [f"{name}={value}" for name, value in environment.items()]
    whole = ["env", *assignments, *argv] if assignments else list(argv)
    return ["sh", "-c", _RUN, "hil-run", str(limit_s), str(wait_s), folder, *outputs, "--", *whole]


def ended(text: str) -> Ended | None:
    """What :func:`run` said, or None where its end is missing."""
    lines = text.split("\n")
    while lines and lines[0] == ".":
        lines.pop(0)
    head = lines[0].split(" ") if lines else []
    if head in ([_MARK, "busy"], [_MARK, "gone"]):
        return Ended(head[1], 0, 0, (), "")
    if len(head) != 3 or head[0] != _MARK or _MARK not in lines[1:]:
        return None
    end = lines.index(_MARK, 1)
    out = "\n".join(lines[end + 1 :])
    late = head[1] == "late"
    try:
        sizes = tuple(None if line.strip() == "-" else _whole(line.strip()) for line in lines[1:end])
        return Ended("late" if late else "exit", 0 if late else _whole(head[1]), _whole(head[2]), sizes, out)
    except ValueError:
        return None


def _whole(text: str) -> int:
    """A whole number as a shell writes it; ValueError where it is none, or one that no board has."""
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise ValueError(f"{text[:40]!r} is no number")
    return int(text)


# ---- what the board shows of itself


def machine(parts: Mapping[str, str]) -> dict[str, Any]:
    """CPU, memory and system, from what :func:`probe` printed; no entry where it printed nothing."""
    arch = parts.get("arch", "")
    shown = parts.get("cpuinfo", "")
    cpu = cpuinfo.cpu_info(arch, shown, _bytes(parts.get("auxv", "")))
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


def _bytes(dump: str) -> bytes:
    """The bytes that ``od -An -tx1`` wrote; none where the board has no such tool."""
    try:
        return bytes.fromhex("".join(dump.split()))
    except ValueError:
        return b""


def readings(text: str) -> list[dict[str, Any]]:
    """What may change while a program runs, named as the agent names it, from lines of ``FILE:VALUE``."""
    values = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return list(cpuinfo.readings({file: values[file] for file in sorted(values, key=_natural)}))


def _natural(text: str) -> list[Any]:
    return [int(piece) if number % 2 else piece for number, piece in enumerate(re.split(r"([0-9]{1,15})", text))]


# ---- which error a failed command is


def failure(ended: Ended, err: str, program: str, *, loads: bool = False) -> errors.HilError:
    """The error that a command's end with another code than 0 stands for.

    ``loads``: the board is known to load what it runs, so the run failed.
    """
    stderr = _COLOUR.sub("", err).strip()
    detail = stderr[-DETAIL:]
    name = posixpath.basename(program)
    if ended.code in _CANNOT_START and not _OF_IREE.search(stderr):
        return errors.LoadFailed(
            f"the board cannot start the command {name}: {_first_line(stderr) or f'exit code {ended.code}'}",
            stage="load",
            hint="the program, or a library that it needs (glibc, libstdc++), is missing there or is of another CPU",
            detail=detail,
        )
    if ended.code in _SIGNALS:
        return _crash(ended.code - 128, name, detail)
    if _OF_IREE.search(stderr) and not loads and not _BEGUN.search(ended.out):
        return errors.LoadFailed(
            f"IREE refused the program: {_first_line(stderr)}", stage="load", hint=_hint(stderr), detail=detail
        )
    return errors.RunFailed(
        f"{name} failed with exit code {ended.code}: {_first_line(stderr)}".rstrip(": "), detail=detail
    )


def _crash(number: int, name: str, detail: str) -> errors.HilError:
    hint = ""
    if number == signal.SIGKILL:
        hint = "hil did not send it: the board may have run out of memory"
    elif number == signal.SIGILL:
        hint = "the program uses instructions this CPU lacks: check the compile target"
    return errors.RunCrashed(f"{name} was killed by {signal_name(number)} during run", hint=hint, detail=detail)


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    best = next((line for line in lines if _OF_IREE.match(line)), lines[0] if lines else "")
    return best[:400]


def _hint(stderr: str) -> str:
    if "INCOMPATIBLE" in stderr or "no executable" in stderr:
        return "the program was compiled for another CPU or device: check the board's compile flags"
    if "no driver" in stderr:
        return "name a device that the command has: [devices] in the board's config"
    return ""
