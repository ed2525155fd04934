"""Traces: the inputs and outputs of a series of calls to a module, kept as .npy and JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.controller.storage.runs import storing
from hil.core.files import read_text, within
from hil.core.tensors import Array, dtype_name, type_text
from hil.errors import UsageError
from hil.testing.traces import structure
from hil.testing.traces.structure import arrays_in

_FILE = "trace.json"
_CALL = "call.json"
LOG = "log.txt"
SCHEMA = 2
# Of how many values a log shows the first and the last.
_SHOWN = 16


@dataclass(frozen=True)
class ModuleCall:
    """One call to a module's method.

    Attributes:
        method: its name.
        inputs: what it was called with, a structure each: dicts, lists and tuples of arrays.
        outputs: what it returned, a structure each: a tuple that it returned as it is, anything else alone in one.
        rtol, atol: within which this call's outputs are compared; None is each dtype's default.
        state: what each variable of the module holds after the call, by name. Of a trace that was loaded it has those
            that the call assigned.
        assigned: the variables that the call assigned: whose value it changed, or whose new value a program returned.
    """

    method: str
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    rtol: float | None = None
    atol: float | None = None
    state: Mapping[str, Array] = field(default_factory=dict)
    assigned: tuple[str, ...] = ()

    def save(self, folder: Path) -> None:
        """Write it into a folder: ``call.json``, ``input_0.npy``, ..., ``output_0.npy``, ..., ``variable_0.npy``, ...

        Raises:
            StorageError: it cannot be written.
        """
        with storing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            values = {
                "inputs": [structure.save(item, folder, f"input_{n}") for n, item in enumerate(self.inputs)],
                "outputs": [structure.save(item, folder, f"output_{n}") for n, item in enumerate(self.outputs)],
                "assigned": [
                    [name, structure.save(self.state[name], folder, f"variable_{n}")]
                    for n, name in enumerate(self.assigned)
                ],
            }
            said = {"method": self.method, "rtol": self.rtol, "atol": self.atol, **values}
            (folder / _CALL).write_text(json.dumps(said, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> ModuleCall:
        """Read one that :meth:`save` wrote.

        Raises:
            UsageError: there is none, or it is damaged.
        """
        said = _read_json(folder / _CALL)
        try:
            values = {
                name: tuple(structure.load(item, folder) for item in _typed(said, name, list, folder))
                for name in ("inputs", "outputs")
            }
            pairs = _typed(said, "assigned", list, folder)
            state = {str(structure.name_of(pair, folder)): structure.load(pair[1], folder) for pair in pairs}
        except RecursionError as error:
            raise UsageError(f"{folder / _CALL} is nested too deeply") from error
        return cls(
            _typed(said, "method", str, folder),
            **values,
            rtol=_typed(said, "rtol", (int, float, type(None)), folder),
            atol=_typed(said, "atol", (int, float, type(None)), folder),
            state=state,
            assigned=tuple(state),
        )

    def __str__(self) -> str:
        lines = [f"Method: {self.method}"]
        assigned = {name: self.state[name] for name in self.assigned}
        parts = {"Inputs": arrays_in(self.inputs), "Outputs": arrays_in(self.outputs)}
        for name, arrays in {**parts, **({"Variables": assigned} if assigned else {})}.items():
            lines.append(f"{name}:")
            for path, array in arrays.items():
                shown = _summary(array)
                lines.append(f"  {path}: {type_text(dtype_name(array.dtype), array.shape)}")
                lines += [f"    {line}" for line in shown.splitlines()]
        return "\n".join(lines)


@dataclass
class Trace:
    """A series of calls to a module on one backend.

    Attributes:
        module_name: of the module's class.
        backend: that ran it: ``tf``, ``iree_llvmcpu``, ``board:rpi5``, ...
        name: of the trace function.
        source: the trace function's own text.
        ran_by: who computed, with versions.
        calls: in order.
        error: what ended the trace early; "" where nothing did.
    """

    module_name: str
    backend: str
    name: str
    source: str = ""
    ran_by: str = ""
    calls: list[ModuleCall] = field(default_factory=list)
    error: str = ""

    def __iter__(self) -> Iterator[ModuleCall]:
        return iter(self.calls)

    def save(self, trace_dir: str | Path) -> Path:
        """Write it to a folder, in place of a trace that is there: ``trace.json``, ``log.txt``, a folder for each call.

        Returns:
            The folder.

        Raises:
            StorageError: it cannot be written.
            UsageError: the folder holds something else.
        """
        folder = Path(trace_dir)
        with storing(folder):
            if folder.exists():
                if any(folder.iterdir()) and not (folder / _FILE).is_file():
                    raise UsageError(f"{folder} holds no trace that could be replaced", hint="name another folder")
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
            said = {key: value for key, value in vars(self).items() if key != "calls"}
            (folder / _FILE).write_text(
                json.dumps({"schema": SCHEMA, **said, "calls": len(self.calls)}, indent=2) + "\n"
            )
            (folder / LOG).write_text(f"{self}\n")
        for number, call in enumerate(self.calls):
            call.save(folder / call_name(number))
        return folder

    @classmethod
    def load(cls, trace_dir: str | Path) -> Trace:
        """Read one that :meth:`save` wrote.

        Raises:
            UsageError: there is none, or it is damaged.
        """
        folder = Path(trace_dir)
        said = _read_json(folder / _FILE)
        if said.pop("schema", None) != SCHEMA:
            raise UsageError(f"{folder / _FILE} is no trace of this version of hil")
        count = _typed(said, "calls", int, folder)
        if count < 0:
            raise UsageError(f"{folder / _FILE} is no trace of hil: it has {count} calls")
        texts = {
            name: _typed(said, name, str, folder)
            for name in ("module_name", "backend", "name", "source", "ran_by", "error")
        }
        return cls(**texts, calls=[ModuleCall.load(folder / call_name(number)) for number in range(count)])

    def __str__(self) -> str:
        head = [f"Trace of {self.module_name} on {self.backend}, function {self.name}: {len(self.calls)} calls"]
        head += [f"Ran by {self.ran_by}"] if self.ran_by else []
        calls = [f"\nCall {number}\n{call}" for number, call in enumerate(self.calls)]
        return "\n".join(
            [*head, *([self.source] if self.source else []), *calls, *([self.error] if self.error else [])]
        )


def call_name(number: int) -> str:
    """The folder of a call in its trace's."""
    return f"call_{number}"


def _summary(array: Any) -> str:
    import numpy as np

    return np.array2string(array, threshold=_SHOWN, edgeitems=3, precision=7)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(read_text(within(path.parent, path)))
    except FileNotFoundError as error:
        raise UsageError(f"{path.parent} holds no trace: there is no {path.name}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise UsageError(f"{path} is no part of a trace")
    return said


def _typed(said: dict[str, Any], name: str, kind: Any, folder: Path) -> Any:
    value = said.get(name)
    if name not in said or not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UsageError(f"{folder} holds no trace of hil: {name} is {str(value)[:60]!r}")
    return value
