"""Profile of a package's runtime: a JSON file with the executed operations (docs/extending.md)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hil.core.bounded_json import read_json
from hil.core.field_types import check_fields
from hil.errors import ImportFailed

OPERATIONS_FILE = "operations.json"
_MAX_NS = 1 << 63


@dataclass(frozen=True)
class Operation:
    """Execution of an operation on the device."""

    name: str
    run: int  # number of the run, from 0, including warm-ups
    # start_ns, end_ns: on the board's clock (hil.core.clock.get_time_ns)
    start_ns: int
    end_ns: int
    nodes: tuple[str, ...] = ()  # names of the model's nodes that the operation computes, completely or in part
    op_types: tuple[str, ...] = ()  # their operators; empty if the names are ONNX nodes, because hil then finds them
    is_overhead: bool = False  # True for work that is not in the model, such as copying or waiting
    ticks: int | None = None  # count of the device's own counter; None if it has none


def write_operations(operations: Iterable[Operation], folder: Path) -> Path:
    """Write the operations to a profile's directory. Return the file, for the result of ``Program.profile``."""
    path = folder / OPERATIONS_FILE
    path.write_text(json.dumps({"operations": [asdict(one) for one in operations]}))
    return path


def read_operations(path: Path) -> list[Operation]:
    """Read a file from :func:`write_operations`, in order of start.

    Raises:
        ImportFailed: the file is damaged.
    """
    try:
        found = [_parse_operation(one) for one in read_json(path)["operations"]]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ImportFailed(f"{path.name} cannot be read: {error}") from error
    return sorted(found, key=lambda one: one.start_ns)


def _parse_operation(values: dict[str, object]) -> Operation:
    operation = Operation(**values)  # type: ignore[arg-type] # check_fields checks the types
    check_fields(operation)
    if not 0 <= operation.start_ns <= operation.end_ns < _MAX_NS or operation.run < 0:
        raise ValueError(f"operation {operation.name!r} has an invalid time or run")
    if operation.ticks is not None and not 0 <= operation.ticks < _MAX_NS:
        raise ValueError(f"operation {operation.name!r} has invalid ticks")
    return replace(operation, nodes=tuple(operation.nodes), op_types=tuple(operation.op_types))
