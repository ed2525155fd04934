"""What tfcompile compiles for: the target that flags name, and the flags for a board."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hil.controller.backends.targets import Target as BoardTarget
from hil.errors import UsageError

_TRIPLE, _CPU, _VARIABLES = "--target-triple", "--target-cpu", "--variables"
# Family of CPUs -> (tfcompile's target, Zig's). Old C libraries, which newer ones still are.
_TARGETS = {
    "x86_64": ("x86_64-unknown-linux-gnu", "x86_64-linux-gnu.2.17"),
    "aarch64": ("aarch64-unknown-linux-gnu", "aarch64-linux-gnu.2.17"),
}
_FAMILY = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Target:
    """What to compile for.

    Attributes:
        triple: as LLVM calls it.
        cpu: as LLVM calls it; "" is any of its family.
        zig: as Zig calls it, with the C library.
        variables: whether the program's variables are arguments and results like others, and not kept with it.
    """

    triple: str
    cpu: str
    zig: str
    variables: bool


def target_of(flags: Sequence[str]) -> Target:
    """What the flags ask for.

    Raises:
        UsageError: a flag is none of ours, or the target is unknown.
    """
    given = {name: value for name, _, value in (flag.partition("=") for flag in flags)}
    if unknown := sorted(set(given) - {_TRIPLE, _CPU, _VARIABLES}):
        raise UsageError(f"tfcompile has no flag {unknown[0]}", hint=f"it has {_TRIPLE}=, {_CPU}= and {_VARIABLES}=")
    variables = given.get(_VARIABLES, "inside")
    if variables not in ("inside", "outside"):
        raise UsageError(f"{_VARIABLES} is 'inside' or 'outside', not {variables!r}")
    machine = platform.machine().lower()
    triple = given.get(_TRIPLE) or _TARGETS.get(_FAMILY.get(machine, machine), ("",))[0]
    family = triple.split("-")[0]
    if _FAMILY.get(family, family) not in _TARGETS or "linux" not in triple:
        raise UsageError(
            f"tfcompile's programs cannot be linked for {triple or machine}",
            hint=f"{_TRIPLE} with one of: {', '.join(known for known, _ in _TARGETS.values())}",
        )
    return Target(triple, given.get(_CPU, ""), _TARGETS[_FAMILY.get(family, family)][1], variables == "outside")


def tfcompile_target(machine: Mapping[str, Any]) -> BoardTarget:
    """Return what to compile for on a machine as a board shows it (``arch``).

    Compiling refuses a machine that there are no programs for.
    """
    arch = str(machine.get("arch", "")).lower()
    triple = f"{_FAMILY.get(arch, arch)}-unknown-linux-gnu"
    return BoardTarget((f"{_TRIPLE}={triple}",), triple) if arch else BoardTarget((), "")
