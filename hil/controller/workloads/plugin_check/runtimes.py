"""Checks of a runtime. The functions run in a worker process, which may die or hang."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.analysis.profile.collect import READABLE
from hil.controller.workloads.plugin_check.compilers import are_alike
from hil.controller.workloads.plugin_check.entry_points import find_point
from hil.controller.workloads.plugin_check.rules import ContractFinding
from hil.controller.workloads.plugin_check.small_models import SMALL_MODELS, TOLERANCE, SmallModel, find_wrong_values
from hil.core.arithmetic import ARITHMETICS
from hil.core.field_types import check_fields
from hil.core.files import MAX_MODEL_BYTES, copy_file, read_file
from hil.core.guarded import format_error
from hil.core.results import Part
from hil.core.runtimes import RUNTIME_GROUP
from hil.core.tensors import Array, TensorSpec, make_spec
from hil.errors import HilError, LoadFailed
from hil.formats.operations import OPERATIONS_FILE, read_operations

_RUNTIME_METHODS = ("describe", "prepare", "load")
_PROGRAM_PARTS = ("inputs", "outputs", "function", "bind", "run", "fetch")
# Error of float16 and bfloat16 in these small models.
_ROUGH = 0.05
_WARM_CYCLES, _CYCLES = 3, 8
_PROFILED = (1, 3)  # warm-ups and iterations
_MODELS = {model.name: model for model in SMALL_MODELS}


class _Runtime:
    """Runtime of a package in this process."""

    def __init__(self, name: str, package: str, arithmetic: str = "") -> None:
        self.kind = find_point(RUNTIME_GROUP, name, package).load()
        self._options = {"arithmetic": arithmetic} if arithmetic else {}

    def open(self, device: str = "") -> Any:
        """Create the runtime and open a device."""
        runtime = self.kind(self._options)
        runtime.prepare(device)
        return runtime

    def load(self, folder: Path, main: str, function: str, device: str = "") -> Any:
        """Create the runtime and load a program."""
        return self.open(device).load(folder, main, device, function)


def describe_runtime(name: str, package: str) -> dict[str, list[Any]]:
    """Check the methods of a runtime and the description. Return ``findings``, and the ``arithmetics`` to check."""
    kind = _Runtime(name, package).kind
    missing = [method for method in _RUNTIME_METHODS if not callable(getattr(kind, method, None))]
    listed = tuple(getattr(kind, "arithmetics", ()))
    found = (
        [ContractFinding("methods", f"the class lacks {', '.join(missing)}")] if missing else _check_description(kind)
    )
    if unknown := [one for one in listed if one not in ARITHMETICS]:
        found.append(ContractFinding("arithmetic", f"unknown: {', '.join(map(repr, unknown))}"))
    known = [one for one in listed if one in ARITHMETICS]
    return {"findings": [one.to_json() for one in found], "arithmetics": known}


def _check_description(kind: Any) -> list[ContractFinding]:
    found = []
    try:
        described = kind.describe()
    except BaseException as error:
        return [ContractFinding("describe", format_error(error))]
    version = described.get("version") if isinstance(described, Mapping) else None
    devices = described.get("devices") if isinstance(described, Mapping) else None
    if not isinstance(version, str) or not version.strip():
        found.append(ContractFinding("describe", f"the version is {version!r}"))
    if not isinstance(devices, list | tuple) or not devices or not all(isinstance(one, str) for one in devices):
        found.append(ContractFinding("describe", f"the devices are {devices!r}"))
    return found


def check_program(name: str, package: str, program: dict[str, Any], arithmetic: str = "") -> list[list[str]]:
    """Load and run a program, and compare its outputs."""
    model = _MODELS.get(program["model"])
    runtime = _Runtime(name, package, arithmetic)
    rule = "arithmetic" if arithmetic else ""
    with _unpack(program) as folder:
        try:
            loaded = runtime.load(folder, program["main"], program["function"])
        except BaseException as error:
            return [
                ContractFinding(
                    rule or "load-program", f"{_where(program, arithmetic)}: {format_error(error)}"
                ).to_json()
            ]
        found = list(_check_loaded(loaded, model, _ROUGH if arithmetic else TOLERANCE))
        if not program["function"] and not found and not arithmetic:
            found += _check_main(runtime, folder, program["main"])
    where = _where(program, arithmetic)
    return [ContractFinding(rule or one.rule, f"{where}: {one.found}").to_json() for one in found]


def _check_main(runtime: _Runtime, folder: Path, main: str) -> list[ContractFinding]:
    """Load the only function by the name that bundles use."""
    try:
        runtime.load(folder, main, "main")
    except BaseException as error:
        return [ContractFinding("load-program", f"as function main: {format_error(error)}")]
    return []


def _where(program: Mapping[str, Any], arithmetic: str) -> str:
    return f"model {program['model']}" + (f" in {arithmetic}" if arithmetic else "")


def _check_loaded(loaded: Any, model: SmallModel | None, tolerance: float) -> list[ContractFinding]:
    missing = [part for part in _PROGRAM_PARTS if not hasattr(loaded, part)]
    specs = [spec for side in ("inputs", "outputs") for spec in getattr(loaded, side, ())]
    if missing or not all(isinstance(spec, TensorSpec) for spec in specs):
        what = f"the program lacks {', '.join(missing)}" if missing else "inputs and outputs must be TensorSpec"
        return [ContractFinding("methods", what)]
    if model is None:
        return []
    wanted = model.compute(*model.inputs.values())
    named = dict(zip(model.outputs, wanted, strict=True))
    for which, side, tensors in (("inputs", loaded.inputs, model.inputs), ("outputs", loaded.outputs, named)):
        expected = [make_spec(name, array) for name, array in tensors.items()]
        if not are_alike(side, expected):
            text = f"{which} are {', '.join(map(str, side))}; expected {', '.join(map(str, expected))}"
            return [ContractFinding("specs", text)]
    try:
        return _run(loaded, model, wanted, tolerance)
    except BaseException as error:
        return [ContractFinding("run", format_error(error))]


def _run(loaded: Any, model: SmallModel, wanted: Sequence[Array], tolerance: float) -> list[ContractFinding]:
    given = [array.copy() for array in model.inputs.values()]
    first = _run_once(loaded, given)
    if problem := _find_type_error(first, wanted):
        return [ContractFinding("outputs", problem)]
    found = []
    for spec, array, right in zip(loaded.outputs, first, wanted, strict=True):
        if text := find_wrong_values(array, right, tolerance):
            found.append(ContractFinding("values", f"output {spec.name} is {text}"))
    if any(one.tobytes() != own.tobytes() for one, own in zip(given, model.inputs.values(), strict=True)):
        found.append(ContractFinding("inputs", "an array that bind() received has other values after the run"))
        return found
    _run_once(loaded, [array.copy() for array in model.others.values()])
    again = _run_once(loaded, [array.copy() for array in model.inputs.values()])
    if any(one.tobytes() != other.tobytes() for one, other in zip(first, again, strict=True)):
        found.append(ContractFinding("determinism", "the outputs differ after a run with other inputs"))
    return [*found, *_check_placement(loaded)]


def _run_once(loaded: Any, given: list[Array]) -> list[Array]:
    loaded.bind(given)
    getattr(loaded, "renew", lambda: None)()
    loaded.run()
    return [np.array(array) if isinstance(array, np.ndarray) else array for array in loaded.fetch()]


def _find_type_error(arrays: Sequence[Any], wanted: Sequence[Array]) -> str:
    if len(arrays) != len(wanted):
        return f"fetch() returned {len(arrays)} values, expected {len(wanted)}"
    for array, right in zip(arrays, wanted, strict=True):
        if not isinstance(array, np.ndarray):
            return f"fetch() returned a {type(array).__name__}, expected a numpy array"
        if (array.dtype, array.shape) != (right.dtype, right.shape):
            return f"fetch() returned {array.shape} {array.dtype}, expected {right.shape} {right.dtype}"
    return ""


def _check_placement(loaded: Any) -> list[ContractFinding]:
    if not hasattr(loaded, "placement"):
        return []
    placed = loaded.placement()
    try:
        for part in placed or ():
            if not isinstance(part, Part):
                raise TypeError(f"{part!r:.80} is not a Part")
            check_fields(part)
    except TypeError as error:
        return [ContractFinding("placement", str(error))]
    return (
        []
        if placed is None or isinstance(placed, tuple)
        else [ContractFinding("placement", f"a {type(placed).__name__}")]
    )


def check_damage(name: str, package: str, program: dict[str, Any]) -> list[list[str]]:
    """Load damaged files of a program. Each must raise LoadFailed."""
    main = program["main"]
    content = read_file(Path(program["files"][main]), MAX_MODEL_BYTES)
    damages = {
        "a truncated program": content[: len(content) // 2],
        "an empty program": b"",
        "a file of zeros": bytes(len(content)),
    }
    found = []
    for what, data in damages.items():
        with _unpack(program) as folder:
            (folder / main).write_bytes(data)
            found += _check_refused(name, package, what, folder, main, program["function"])
    return [one.to_json() for one in found]


def check_misuse(name: str, package: str, program: dict[str, Any]) -> list[list[str]]:
    """Load a program with an unknown device and an unknown function. Both must raise LoadFailed."""
    with _unpack(program) as folder:
        main, function = program["main"], program["function"]
        found = _check_refused(name, package, "an unknown device", folder, main, function, "hil-no-such-device")
        found += _check_refused(name, package, "an unknown function", folder, main, "hil_no_such_function")
    return [one.to_json() for one in found]


def _check_refused(
    name: str, package: str, what: str, folder: Path, main: str, function: str, device: str = ""
) -> list[ContractFinding]:
    try:
        _Runtime(name, package).load(folder, main, function, device)
    except LoadFailed:
        return []
    except BaseException as error:
        return [ContractFinding("load-error", f"{what} raises {format_error(error)}")]
    return [ContractFinding("load-error", f"{what} raises no error")]


def can_count_files() -> bool:
    """Return whether this system can list open files and threads."""
    return Path("/proc/self/task").exists()


def check_leaks(name: str, package: str, program: dict[str, Any]) -> list[list[str]]:
    """Load and run a program multiple times with one runtime, as an agent does. Count open files and threads."""
    model = _MODELS[program["model"]]
    runtime = _Runtime(name, package).open()

    def cycle(count: int) -> tuple[int, int]:
        for _ in range(count):
            with _unpack(program) as folder:
                loaded = runtime.load(folder, program["main"], "", program["function"])
                _run_once(loaded, [array.copy() for array in model.inputs.values()])
                del loaded
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))  # noqa: PTH208 - names alone

    before, after = cycle(_WARM_CYCLES), cycle(_CYCLES)
    names = ("open files", "threads")
    # A library may open a few more files or threads once.
    return [
        ContractFinding("leak", f"{end - start} more {what} after {_CYCLES} loads").to_json()
        for what, start, end in zip(names, before, after, strict=True)
        if end - start >= _CYCLES // 2
    ]


def check_profile(name: str, package: str, program: dict[str, Any]) -> list[list[str]]:
    """Profile a program, if it supports this."""
    model = _MODELS[program["model"]]
    warmup, iterations = _PROFILED
    with _unpack(program) as folder, tempfile.TemporaryDirectory() as place:
        loaded = _Runtime(name, package).load(folder, program["main"], program["function"])
        if not hasattr(loaded, "profile"):
            return []
        loaded.bind([array.copy() for array in model.inputs.values()])
        checked: list[Any] = []
        try:
            files = loaded.profile(warmup, iterations, Path(place), None, checked.append)
            problem = _find_profile_error(files, Path(place), warmup + iterations)
        except BaseException as error:
            problem = format_error(error)
    wanted = warmup + iterations if getattr(loaded, "profile_has_outputs", True) else 0
    if not problem and len(checked) != wanted:
        problem = f"check was called {len(checked)} times, expected {wanted}"
    return [ContractFinding("profile", problem).to_json()] if problem else []


def _find_profile_error(files: Any, folder: Path, runs: int) -> str:
    if not isinstance(files, list | tuple) or not all(isinstance(one, Path) and one.is_file() for one in files):
        return f"the result must be a list of existing files, got {files!r:.80}"
    if any(one.parent != folder for one in files):
        return "a file is not in the given directory"
    names = {one.name for one in files}
    if not names & set(READABLE):
        return f"hil cannot read {', '.join(sorted(names)) or 'an empty list'}: expected {OPERATIONS_FILE}"
    if OPERATIONS_FILE not in names:
        return ""
    try:
        operations = read_operations(folder / OPERATIONS_FILE)
    except HilError as error:
        return error.message
    seen = {one.run for one in operations}
    return "" if seen == set(range(runs)) else f"{OPERATIONS_FILE} has the runs {sorted(seen)}, expected {runs} runs"


@contextlib.contextmanager
def _unpack(program: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a directory with copies of a program's files, as on a board."""
    with tempfile.TemporaryDirectory() as place:
        for name, file in program["files"].items():
            (Path(place) / name).parent.mkdir(parents=True, exist_ok=True)
            copy_file(file, Path(place) / name)
        yield Path(place)
