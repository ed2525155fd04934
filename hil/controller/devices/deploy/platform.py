"""A board's platform: which wheels its Python takes, and why no agent can be put there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from hil.errors import BoardError, StorageError

STAGE = "deploy"
COMMAND_HINT = 'the board can be served without an agent: set runtime.kind = "command" in its config'


@contextlib.contextmanager
def at_home() -> Iterator[None]:
    """This machine's own troubles with files, which are none of the board's.

    Raises:
        StorageError: in place of any OSError.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the agent could not be made ready on this machine: {error}", hint="is its disk full? TMPDIR names another"
        ) from error


class NoAgentHere(BoardError):
    """The board cannot run hil's agent, now or ever; without an agent it may still serve."""


class NoPython(NoAgentHere):
    """The board has no Python that the agent can use."""


class NoWheels(NoAgentHere):
    """A package that the agent needs is not published for the board's platform."""


# The oldest glibc that manylinux tags speak of, and the tags' older names.
_OLDEST_GLIBC = {"x86_64": 5, "i686": 5}
_NEWER_MACHINES_GLIBC = 17
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_LIBC = re.compile(r"(glibc|musl)-([0-9]{1,3})\.([0-9]{1,3})")


@dataclass(frozen=True)
class Interpreter:
    """A Python on a board.

    Attributes:
        path: the executable, links followed.
        version: (3, 11), say.
        machine: the architecture that it was built for, as ``uname -m`` would say it.
        libc: ``glibc-2.36`` or ``musl-1.2``; "" where it could not be told.
        problem: why it cannot be used; "" where it can.
    """

    path: str
    version: tuple[int, int]
    machine: str
    libc: str
    problem: str = ""

    @property
    def text(self) -> str:
        """It in a few words, such as ``Python 3.11 on aarch64, glibc 2.36``."""
        name = f"Python {'.'.join(map(str, self.version))} on {self.machine}"
        return f"{name}, {self.libc.replace('-', ' ')}" if self.libc else name


def platform_tags(interpreter: Interpreter) -> list[str]:
    """The platform tags of the wheels that it takes, the newest first; none where its C library is unknown."""
    found = _LIBC.fullmatch(interpreter.libc)
    if not found or found[2] != ("2" if found[1] == "glibc" else "1"):
        return []
    machine, newest = interpreter.machine, int(found[3])
    if found[1] == "musl":
        return [f"musllinux_1_{minor}_{machine}" for minor in range(newest, -1, -1)]
    tags = []
    for minor in range(newest, _OLDEST_GLIBC.get(machine, _NEWER_MACHINES_GLIBC) - 1, -1):
        tags.append(f"manylinux_2_{minor}_{machine}")
        if minor in _OLD_NAMES:
            tags.append(f"{_OLD_NAMES[minor]}_{machine}")
    return tags


def pip_options(interpreter: Interpreter) -> list[str]:
    """Options with which pip, on this machine, picks wheels for that interpreter."""
    number = "".join(map(str, interpreter.version))
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={number}"]
    options += [f"--abi={abi}" for abi in (f"cp{number}", "abi3", "none")]
    return options + [f"--platform={tag}" for tag in platform_tags(interpreter)]
