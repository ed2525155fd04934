"""Traces: calls of a module's methods with inputs, outputs and state, in memory and in a directory."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.models.tensorflow.graphs import Structure, iter_leaves
from hil.controller.storage.runs import convert_write_errors
from hil.controller.storage.sources.origin import find_origin
from hil.core.bounded_json import read_json
from hil.core.files import MAX_TEXT_BYTES, resolve_within
from hil.core.npy import load_npy, save_npy
from hil.core.tensors import Array, get_dtype_name, parse_dtype, type_text
from hil.errors import UsageError

_PLAIN = (bool, int, float, str)

FILE = "trace.json"
# String fields in the file.
_TEXTS = ("module_name", "backend", "name", "source", "ran_by", "error")
_CALL = "call.json"
LOG = "log.txt"
# File with a trace's comparison, in the trace's directory. The field OF_TRACE contains the trace's creation time, so
# that the comparison is not applied to a newer trace.
COMPARISON = "comparison.json"
OF_TRACE = "trace_created"
SCHEMA = 2
# A call is stored in MODULE/BACKEND/traces/TRACE/call_N.
_DEPTH = 4
# Programs stay loaded for the whole trace, because they may have internal state.
MAX_LOADED = 1 << 20
# Logs abbreviate arrays with more values than this.
_SHOWN = 16


def list_arrays(structure: Structure) -> dict[str, Array]:
    """Return the tensors of a structure by path, such as ``0.a.0`` for ``({"a": [x]},)``. Dict keys are sorted."""
    return {path: leaf for path, leaf in iter_leaves(structure) if isinstance(leaf, np.ndarray)}


def convert_to_numpy(what: str, value: Any) -> Structure:
    """Convert a structure of framework tensors to NumPy arrays. All tuple types become plain tuples.

    Args:
        what: name of the value in error messages.
        value: dicts (with str or int keys), lists and tuples of arrays, objects with ``numpy()``, None, Python numbers
            and strings.

    Raises:
        UsageError: a leaf or key has an unsupported type, or a tensor has an unsupported dtype.
    """
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise UsageError(f"{what}: unsupported key {key!r}", hint="use strings or integers as keys")
        return {key: convert_to_numpy(f"{what}.{key}", item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [convert_to_numpy(f"{what}.{number}", item) for number, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if value is None or type(value) in _PLAIN:
        return value
    array = value.numpy() if callable(getattr(value, "numpy", None)) else value
    if isinstance(array, (bytes, np.str_)):
        array = np.array(array, dtype=object)
    if not isinstance(array, (np.ndarray, np.generic)):
        raise UsageError(
            f"{what}: unsupported type {type(value).__name__}", hint="use arrays, nested in dicts or lists"
        )
    # Copy, because the caller may modify the array later.
    return _convert_tensor(what, np.array(array))


def _convert_tensor(what: str, array: Array) -> Array:
    if array.dtype.kind in "OSU":
        texts = np.empty(array.size, dtype=object)
        texts[:] = [item.decode(errors="replace") if isinstance(item, bytes) else str(item) for item in array.flat]
        return texts.reshape(array.shape)
    try:
        get_dtype_name(array.dtype)
    except UsageError as error:
        raise UsageError(f"{what}: {error.message}", hint=error.hint) from error
    return array


def reinterpret_bits(dtype: str, array: Array) -> Array:
    """Reinterpret the bits of an array as ``dtype`` ("": unchanged). A program may use int8 for uint8 of the model."""
    wanted = parse_dtype(dtype) if dtype else array.dtype
    both_integers = array.dtype.kind in "iu" and wanted.kind in "iu"
    return array.view(wanted) if both_integers and array.dtype.itemsize == wanted.itemsize else array


def save_structure(structure: Structure, folder: Path, stem: str) -> Any:
    """Write a structure's tensors to ``STEM.npy``, ``STEM.0.npy``, ... and return a JSON description of the structure.

    Raises:
        UsageError: the structure has an unsupported type.
    """
    if isinstance(structure, np.ndarray):
        save_npy(folder / f"{stem}.npy", structure)
        return {"npy": f"{stem}.npy", "dtype": get_dtype_name(structure.dtype), "shape": list(structure.shape)}
    if isinstance(structure, dict):
        items = [[key, save_structure(item, folder, f"{stem}.{n}")] for n, (key, item) in enumerate(structure.items())]
        return {"dict": items}
    if isinstance(structure, (list, tuple)):
        kind = "list" if isinstance(structure, list) else "tuple"
        return {kind: [save_structure(item, folder, f"{stem}.{number}") for number, item in enumerate(structure)]}
    if type(structure) is float:
        return {"float": repr(structure)}  # JSON lacks inf and nan
    if structure is None or type(structure) in _PLAIN:
        return {"value": structure}
    raise UsageError(f"{stem}: unsupported type {type(structure).__name__} in a trace")


def load_structure(saved: Any, folder: Path) -> Structure:
    """Read a structure that :func:`save_structure` wrote.

    Raises:
        UsageError: the description is invalid, or a tensor file is missing or of the wrong type.
    """
    wrong = f"{folder}: invalid call of a trace"
    kind, content = next(iter(saved.items())) if isinstance(saved, dict) and len(saved) == 1 else ("", None)
    if kind in ("list", "tuple") and isinstance(content, list):
        items = [load_structure(item, folder) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "dict" and isinstance(content, list):
        return load_pairs(content, folder)
    if kind == "float" and isinstance(content, str):
        try:
            return float(content)
        except ValueError as error:
            raise UsageError(f"{wrong}: expected a number, got {content[:60]!r}") from error
    if kind == "value" and (content is None or type(content) in (bool, int, str)):
        return content
    if isinstance(saved, dict) and saved.keys() == {"npy", "dtype", "shape"}:
        return _load_npy(saved, folder)
    raise UsageError(f"{wrong}: unknown value {str(saved)[:60]!r}")


def load_pairs(pairs: Sequence[Any], folder: Path) -> dict[str | int, Structure]:
    """Read structures by name from pairs that :meth:`ModuleCall.save` wrote. Raises UsageError for invalid pairs."""
    found: dict[str | int, Structure] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int):
            raise UsageError(f"{folder}: invalid call of a trace: expected a key and a value, got {str(pair)[:60]!r}")
        found[pair[0]] = load_structure(pair[1], folder)
    return found


def _load_npy(saved: Mapping[str, Any], folder: Path) -> Array:
    name, dtype = saved["npy"], saved["dtype"]
    if not isinstance(name, str) or not isinstance(dtype, str) or Path(name).name != name:
        raise UsageError(f"{folder}: invalid call of a trace: invalid file name {name!r}")
    array = load_npy(resolve_within(folder, folder / name), dtype)
    if get_dtype_name(array.dtype) != dtype or list(array.shape) != saved["shape"]:
        raise UsageError(
            f"{folder / name} contains {list(array.shape)} {array.dtype}, expected {saved['shape']} {dtype}"
        )
    return array


@dataclass(frozen=True)
class CallProgram:
    """Program of a call, which any board can run to repeat the call.

    Inputs: the call's tensors, then the captured values. Outputs: the call's outputs, then the new values of variables.
    """

    model: Path  # program source; in a stored trace, a file in the module's directory
    function: str  # function in the model; "" is the only function
    runtime: str  # ``iree`` or ``tflite``
    # captured, assigned: names of variables that the call reads and writes. Captured names include constants.
    # :attr:`Trace.initial` contains the initial values.
    captured: tuple[str, ...] = ()
    assigned: tuple[str, ...] = ()

    def to_json(self, folder: Path) -> dict[str, Any]:
        """Return the JSON form for a call in this directory."""
        model = os.path.relpath(self.model.absolute(), folder.absolute())
        return {**vars(self), "model": model}

    @classmethod
    def from_json(cls, saved: Any, folder: Path) -> CallProgram:
        """Parse the result of :meth:`to_json`. Raises UsageError if invalid or if the model is outside the module."""
        kinds = {"model": str, "function": str, "runtime": str, "captured": list, "assigned": list}
        if not isinstance(saved, dict) or not all(isinstance(saved.get(name), kind) for name, kind in kinds.items()):
            raise UsageError(f"{folder}: invalid call of a trace: invalid program {str(saved)[:60]!r}")
        names = (tuple(map(str, saved[name])) for name in ("captured", "assigned"))
        module = folder.absolute().joinpath(*[os.pardir] * _DEPTH).resolve()
        return cls(
            resolve_within(module, folder / saved["model"]).resolve(), saved["function"], saved["runtime"], *names
        )


@dataclass(frozen=True)
class ModuleCall:
    """Call of a module's method."""

    method: str
    inputs: tuple[Any, ...]  # one structure per argument: dicts, lists and tuples with arrays
    # The returned tuple, or a tuple with the returned value. Each item is a structure.
    outputs: tuple[Any, ...]
    # rtol, atol: tolerances for the call's outputs; None is the dtype's default.
    rtol: float | None = None
    atol: float | None = None
    # The module's variable values after the call, by name. In a loaded trace: only the assigned variables.
    state: Mapping[str, Array] = field(default_factory=dict)
    # Names of variables whose value changed, or for which the program returned a new value.
    assigned: tuple[str, ...] = ()
    program: CallProgram | None = None  # None if the backend has no program, such as TensorFlow

    def save(self, folder: Path) -> None:
        """Write ``call.json``, ``input_0.npy``, ..., ``output_0.npy``, ..., ``variable_0.npy``, ... to a directory.

        Raises:
            StorageError: a file cannot be written.
        """
        with convert_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            document = {
                "method": self.method,
                "rtol": self.rtol,
                "atol": self.atol,
                "inputs": [save_structure(item, folder, f"input_{n}") for n, item in enumerate(self.inputs)],
                "outputs": [save_structure(item, folder, f"output_{n}") for n, item in enumerate(self.outputs)],
                "assigned": [
                    [name, save_structure(self.state[name], folder, f"variable_{n}")]
                    for n, name in enumerate(self.assigned)
                ],
                "program": self.program and self.program.to_json(folder),
            }
            (folder / _CALL).write_text(json.dumps(document, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> ModuleCall:
        """Read a call that :meth:`save` wrote. Raises UsageError if it is missing or damaged."""
        number = (int, float, type(None))
        kinds = {"method": str, "rtol": number, "atol": number, "inputs": list, "outputs": list, "assigned": list}
        fields = _read_fields(folder / _CALL, kinds, {"program": (dict, type(None))})
        try:
            for side in ("inputs", "outputs"):
                fields[side] = tuple(load_structure(item, folder) for item in fields[side])
            state = {str(name): value for name, value in load_pairs(fields.pop("assigned"), folder).items()}
        except RecursionError as error:
            raise UsageError(f"{folder / _CALL} exceeds the nesting limit") from error
        saved = fields.pop("program", None)
        program = CallProgram.from_json(saved, folder) if saved else None
        return cls(**fields, state=state, assigned=tuple(state), program=program)

    def __str__(self) -> str:
        lines = [f"Method: {self.method}"]
        assigned = {name: self.state[name] for name in self.assigned}
        parts = {"Inputs": list_arrays(self.inputs), "Outputs": list_arrays(self.outputs)}
        for name, arrays in {**parts, **({"Variables": assigned} if assigned else {})}.items():
            lines.append(f"{name}:")
            for path, array in arrays.items():
                shown = np.array2string(array, threshold=_SHOWN, edgeitems=3, precision=7)
                lines.append(f"  {path}: {type_text(get_dtype_name(array.dtype), array.shape)}")
                lines += [f"    {line}" for line in shown.splitlines()]
        return "\n".join(lines)


@dataclass
class Trace:
    """Series of module calls on a backend."""

    module_name: str
    backend: str  # ``tf``, ``iree_llvmcpu``, ``board:rpi5``, ..
    name: str
    source: str = ""
    ran_by: str = ""  # runtime with versions
    calls: list[ModuleCall] = field(default_factory=list)
    error: str = ""  # error that ended the trace early, or ""
    # Values of captured variables and constants before the first call that captures them.
    initial: dict[str, Array] = field(default_factory=dict)
    reference: Path | None = None  # the trace that this trace was compared with
    # Origin (:func:`hil.controller.storage.sources.origin.find_origin`), and creation time in seconds since the epoch.
    # Before :meth:`save`, the origin is empty and the time is 0.
    origin: dict[str, Any] = field(default_factory=dict)
    created: float = 0.0
    command: str = ""  # command that recreates the trace; "" if unknown

    def __iter__(self) -> Iterator[ModuleCall]:
        return iter(self.calls)

    def save(self, trace_dir: str | Path) -> Path:
        """Write ``trace.json``, ``log.txt`` and a directory per call. Replace an existing trace.

        Raises:
            StorageError: a file cannot be written.
            UsageError: the directory contains other files.
        """
        folder = Path(trace_dir)
        with convert_write_errors(folder):
            if folder.exists():
                if any(folder.iterdir()) and not (folder / FILE).is_file():
                    raise UsageError(f"{folder} contains other files than a trace", hint="use a different directory")
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
            initial = [
                [name, save_structure(value, folder, f"initial_{n}")]
                for n, (name, value) in enumerate(self.initial.items())
            ]
            reference = self.reference and os.path.relpath(self.reference.absolute(), folder.absolute())
            known: dict[str, Any] = {"calls": len(self.calls), "initial": initial, "reference": reference}
            known |= {"origin": self.origin or find_origin().to_json(), "created": self.created or time.time()}
            document = {"schema": SCHEMA, **vars(self), **known}
            (folder / FILE).write_text(json.dumps(document, indent=2) + "\n")
            (folder / LOG).write_text(f"{self}\n")
        for number, call in enumerate(self.calls):
            call.save(folder / call_name(number))
        return folder

    @classmethod
    def load(cls, trace_dir: str | Path) -> Trace:
        """Read a trace that :meth:`save` wrote. Raises UsageError if it is missing or damaged."""
        folder = Path(trace_dir)
        kinds = {**dict.fromkeys(_TEXTS, str), "calls": int}
        later = {"initial": list, "reference": (str, type(None)), "origin": dict, "created": (int, float)}
        later["command"] = str
        fields = _read_fields(folder / FILE, kinds, later, schema=SCHEMA)
        count = fields.pop("calls")
        if count < 0:
            raise UsageError(f"{folder / FILE}: invalid number of calls {count}")
        try:
            initial = load_pairs(fields.get("initial", ()), folder)
        except RecursionError as error:
            raise UsageError(f"{folder / FILE} exceeds the nesting limit") from error
        fields["initial"] = {str(name): value for name, value in initial.items()}
        reference = fields.get("reference")
        fields["reference"] = (folder / reference).resolve() if reference else None
        return cls(**fields, calls=[ModuleCall.load(folder / call_name(number)) for number in range(count)])

    def __str__(self) -> str:
        head = [f"Trace of {self.module_name} on {self.backend}, function {self.name}: {len(self.calls)} calls"]
        head += [f"Ran by {self.ran_by}"] if self.ran_by else []
        calls = [f"\nCall {number}\n{call}" for number, call in enumerate(self.calls)]
        return "\n".join([*head, *filter(None, [self.source]), *calls, *filter(None, [self.error])])


def call_name(number: int) -> str:
    """Return the directory name of a call."""
    return f"call_{number}"


def read_creation_time(trace_dir: Path) -> float:
    """Return the creation time of a stored trace, or 0 if unknown. Raises UsageError as :meth:`Trace.load` does."""
    return float(_read_fields(trace_dir / FILE, {}, {"created": (int, float)}, schema=SCHEMA).get("created", 0))


def _read_fields(
    path: Path, kinds: Mapping[str, Any], later: Mapping[str, Any], *, schema: int | None = None
) -> dict[str, Any]:
    """Read typed fields of a JSON object. Fields in ``later`` are optional, because old traces lack them."""
    try:
        found = read_json(resolve_within(path.parent, path), MAX_TEXT_BYTES)
    except FileNotFoundError as error:
        raise UsageError(f"no trace found in {path.parent}: missing {path.name}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path}: expected a JSON object")
    if schema is not None and found.get("schema") != schema:
        raise UsageError(f"{path}: unsupported trace version: this hil reads version {schema}")
    kinds = {**kinds, **{name: kind for name, kind in later.items() if name in found}}
    for name, kind in kinds.items():
        value = found.get(name)
        if name not in found or not isinstance(value, kind) or isinstance(value, bool):
            raise UsageError(f"{path}: invalid {name} {str(value)[:60]!r}")
    return {name: found[name] for name in kinds}
