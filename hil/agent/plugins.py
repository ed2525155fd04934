"""Stable names for runtimes of packages (docs/extending.md). A board has this module, but not :mod:`hil.plugins`."""

from __future__ import annotations

from hil.agent.runtimes import Check, ClockPairs, Program, Runtime
from hil.core.clock import get_time_ns
from hil.core.files import open_file, read_file
from hil.core.placement_reasons import PlacementReason
from hil.core.results import Part, Placement
from hil.core.tensors import Array, TensorSpec, make_spec, parse_dtype
from hil.errors import ErrorCode, LoadFailed, RunFailed
from hil.formats.operations import Operation, write_operations

__all__ = [
    "Array",
    "Check",
    "ClockPairs",
    "ErrorCode",
    "LoadFailed",
    "Operation",
    "Part",
    "Placement",
    "PlacementReason",
    "Program",
    "RunFailed",
    "Runtime",
    "TensorSpec",
    "get_time_ns",
    "make_spec",
    "open_file",
    "parse_dtype",
    "read_file",
    "write_operations",
]
