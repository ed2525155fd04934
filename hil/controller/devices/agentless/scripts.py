"""What the board's own shell does for a board without an agent, and what its answers mean.

The scripts are POSIX sh, with the tools that busybox has too. Their texts are constants. Whatever varies is an argument
of the script, so nothing that comes from a model, a file name or a config is ever read as shell.
"""

from __future__ import annotations

import posixpath
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from hil.core import cpuinfo
from hil.core.processes import signal_name
from hil.errors import HilError, LoadFailed, RunCrashed, RunFailed

_MARK = "hil-command"
# What the probe ends with where it cannot make hil's folder, or somebody else made it.
NO_FOLDER = 73
_MEMORY = re.compile(r"^MemTotal:\s*([0-9]{1,15}) kB", re.M)
_CORE = re.compile(r"^processor\s*:", re.M)
_CANNOT_START = (126, 127)
# A shell adds the signal's number to 128; a program that ends with -1 has the code 255, and crashed of nothing.
_SIGNALS = range(129, 129 + 64)
_DETAIL = 4000
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


def probe(folder: str) -> list[str]:
    """The command that makes hil's folder and tells of the machine; read its output with :func:`parts`."""
    return ["sh", "-c", _LOOK + _PROBE, "hil-probe", folder]


def look() -> list[str]:
    """The command that tells what may have changed since; read its output with :func:`parts`."""
    script = f"{_LOOK}part readings; readings; part boot_id; cat /proc/sys/kernel/random/boot_id; part end"
    return ["sh", "-c", script, "hil-look"]


def parts(text: str) -> dict[str, str]:
    """What :func:`probe` or :func:`look` said: part -> its text."""
    pieces = re.split(r"^hil-command (\w+)\n", text, flags=re.M)
    return {name: body.strip("\n") for name, body in zip(pieces[1::2], pieces[2::2], strict=True)}


def have(files: Sequence[str]) -> list[str]:
    """The command that tells which files are there; read its output with :func:`sizes_and_sums`."""
    return ["sh", "-c", _HAVE, "hil-have", *files]


def sizes_and_sums(text: str) -> list[tuple[int, str] | None]:
    """Size and SHA-256 ("" where the board has no tool for it) of each file, None where there is none.

    Raises:
        ValueError: that is not what the script writes.
    """
    found: list[tuple[int, str] | None] = []
    for line in text.splitlines():
        size, _, digest = line.partition(" ")
        found.append(None if line == "-" else (_whole(size), digest))
    return found


def room(folder: str, minutes: int) -> list[str]:
    """The command that removes programs not used for so many minutes; read its output with :func:`free_bytes`."""
    return ["sh", "-c", _ROOM, "hil-room", folder, str(minutes)]


def free_bytes(text: str) -> int | None:
    """What ``df -Pk`` says is free, in bytes; None where it says nothing."""
    match = re.search(r"\s[0-9]+\s+[0-9]+\s+([0-9]{1,15})\s+[0-9]+%", text)
    return int(match[1]) * 1024 if match else None


def remove(folder: str) -> list[str]:
    """The command that removes a run's folder."""
    return ["rm", "-rf", "--", folder]


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
    said = lines[0].split(" ") if lines else []
    if said in ([_MARK, "busy"], [_MARK, "gone"]):
        return Ended(said[1], 0, 0, (), "")
    if len(said) != 3 or said[0] != _MARK or _MARK not in lines[1:]:
        return None
    end = lines.index(_MARK, 1)
    out = "\n".join(lines[end + 1 :])
    late = said[1] == "late"
    try:
        sizes = tuple(None if line.strip() == "-" else _whole(line.strip()) for line in lines[1:end])
        return Ended("late" if late else "exit", 0 if late else _whole(said[1]), _whole(said[2]), sizes, out)
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


def failure(ended: Ended, err: str, program: str, *, loads: bool = False) -> HilError:
    """The error that a command's end with another code than 0 stands for.

    ``loads``: the board is known to load what it runs, so the run failed.
    """
    said = _COLOUR.sub("", err).strip()
    detail = said[-_DETAIL:]
    name = posixpath.basename(program)
    if ended.code in _CANNOT_START and not _OF_IREE.search(said):
        return LoadFailed(
            f"the board cannot start the command {name}: {_first_line(said) or f'exit code {ended.code}'}",
            stage="load",
            hint="the program, or a library that it needs (glibc, libstdc++), is missing there or is of another CPU",
            detail=detail,
        )
    if ended.code in _SIGNALS:
        return _crash(ended.code - 128, name, detail)
    if _OF_IREE.search(said) and not loads and not _BEGUN.search(ended.out):
        return LoadFailed(
            f"IREE refused the program: {_first_line(said)}", stage="load", hint=_hint(said), detail=detail
        )
    return RunFailed(f"{name} failed with exit code {ended.code}: {_first_line(said)}".rstrip(": "), detail=detail)


def _crash(number: int, name: str, detail: str) -> HilError:
    hint = ""
    if number == signal.SIGKILL:
        hint = "hil did not send it: the board may have run out of memory"
    elif number == signal.SIGILL:
        hint = "the program uses instructions this CPU lacks: check the compile target"
    return RunCrashed(f"{name} was killed by {signal_name(number)} during run", hint=hint, detail=detail)


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    best = next((line for line in lines if _OF_IREE.match(line)), lines[0] if lines else "")
    return best[:400]


def _hint(said: str) -> str:
    if "INCOMPATIBLE" in said or "no executable" in said:
        return "the program was compiled for another CPU or device: check the board's compile flags"
    if "no driver" in said:
        return "name a device that the command has: [devices] in the board's config"
    return ""
