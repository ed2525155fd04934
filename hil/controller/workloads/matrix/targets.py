"""Targets of a matrix: the combinations of repeated options."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from hil.controller.storage.runs import make_safe_name
from hil.core.text import make_names_unique
from hil.errors import UsageError

# Request field -> option. Target names contain the values in this order.
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
class MatrixTarget:
    """A combination of options."""

    name: str  # unique; also the directory name
    options: Mapping[str, str]  # request field -> value


def combine_targets(axes: Mapping[str, Sequence[str]]) -> tuple[MatrixTarget, ...]:
    """Return all combinations of values; the last axis varies fastest. Without repeated options, return one target.

    Args:
        axes: key of :data:`AXES` -> given values. An empty axis does not change the field.

    Raises:
        UsageError: an axis has the same value twice.
    """
    chosen = {field: tuple(axes[field]) for field in AXES if axes.get(field)}
    for field, values in chosen.items():
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise UsageError(f"duplicate {AXES[field]} {twice}", hint="specify each value once")
    several = [field for field, values in chosen.items() if len(values) > 1]
    combinations = [dict(zip(chosen, values, strict=True)) for values in itertools.product(*chosen.values())]
    names = ["-".join(_shorten_value(options[field]) for field in several) or "target" for options in combinations]
    unique = make_names_unique(names, alike=str.casefold)
    return tuple(MatrixTarget(name, options) for name, options in zip(unique, combinations, strict=True))


def _shorten_value(value: str) -> str:
    """Return a short form of a value for names: the flow's name for ``FILE.toml:NAME``, or the stem of a file."""
    file, suffix, chosen = value.partition(".toml")
    return make_safe_name((chosen.removeprefix(":") or Path(file).name) if suffix else value)
