"""Targets: what the same cases are run on, each combination of the options that were given several times."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from hil.controller.storage.runs import safe_name
from hil.core.text import numbered
from hil.errors import UsageError

# Field of a request -> its option. A target is called after their values in this order.
AXES = MappingProxyType(
    {
        "flow": "--flow",
        "runtime": "--runtime",
        "selector": "--select",
        "board": "--board",
        "hw_type": "--runtime-hw-type",
    }
)


@dataclass(frozen=True)
class Target:
    """One of the combinations."""

    name: str  # unique, and what its folder is called
    options: Mapping[str, str]  # field of a request -> its value here


def targets_of(axes: Mapping[str, Sequence[str]]) -> tuple[Target, ...]:
    """Every combination of values, the last axis changing first; one target where no axis has several values.

    Args:
        axes: key of :data:`AXES` -> the values that were given; none leaves the field as it is.

    Raises:
        UsageError: an axis has the same value twice.
    """
    chosen = {field: tuple(axes[field]) for field in AXES if axes.get(field)}
    for field, values in chosen.items():
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise UsageError(f"{AXES[field]} {twice} is given twice", hint="each target once")
    several = [field for field, values in chosen.items() if len(values) > 1]
    combinations = [dict(zip(chosen, values, strict=True)) for values in itertools.product(*chosen.values())]
    names = ["-".join(_word(options[field]) for field in several) or "target" for options in combinations]
    unique = numbered(names, alike=str.casefold)
    return tuple(Target(name, options) for name, options in zip(unique, combinations, strict=True))


def _word(value: str) -> str:
    """What stands for a value in names: of a flow's file and name (``FILE.toml:NAME``) the name, of a file its stem."""
    file, suffix, chosen = value.partition(".toml")
    return safe_name((chosen.removeprefix(":") or Path(file).name) if suffix else value)
