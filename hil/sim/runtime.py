"""Simulated runtimes: a real runtime with the device's arithmetic and faults."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import random
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from hil.agent.runtimes import Check, run_command
from hil.core.arithmetic import FLOAT32
from hil.core.clock import CLOCK_FILE
from hil.core.files import digest_file
from hil.core.instructions import SIMULATED
from hil.core.named import resolve
from hil.core.results import Part, Placement
from hil.core.runtimes import list_known_runtimes
from hil.core.stepped_program import make_step_program
from hil.core.steps import StepsPlan
from hil.core.tensors import Array, TensorSpec
from hil.errors import LoadFailed, RunFailed, UsageError, format_expected
from hil.formats.iree_values import SCALAR_PREFIX
from hil.sim.conditions import SimConditions
from hil.sim.faults import Charges, Fault, SimClock, end_agent, is_affecting, parse
from hil.sim.references import PREFIX
from hil.sim.steps import SimSteps

# The operator Cast supports bfloat16 since this opset.
_BFLOAT16_OPSET = 13
_ELSEWHERE = "another-device"
# Number of nodes to assume if a runtime does not report nodes. The ``fallback`` fault reports a share of them on a
# different device.
_MIN_NODES = 10
# Faulty profiling tools. This tool crashes by reading address 0, because children of a sandboxed worker cannot send
# signals, even to themselves.
_CRASHES = f"""#!/bin/sh
echo simulated crash >&2
exec {shlex.quote(sys.executable)} -I -S -c 'import ctypes; ctypes.string_at(0)'
"""
_HANGS = "#!/bin/sh\nexec sleep 86400\n"


def __getattr__(name: str) -> type[SimRuntime]:
    """Return the simulated runtime for a reference from :func:`hil.sim.references.make_reference`."""
    runtime = name.removeprefix(PREFIX)
    info = list_known_runtimes().get(runtime)
    if runtime == name or info is None or not info.agent:
        raise AttributeError(f"hil.sim.runtime has no attribute {name!r}")
    return _make_simulated(runtime)


@functools.cache
def _make_simulated(name: str) -> type[SimRuntime]:
    info = list_known_runtimes()[name]
    # The simulator changes the programs of hil's runtimes. A package's programs may have a different format.
    kind = SimPackageRuntime if info.of_package else resolve(info.simulator)
    return type(kind.__name__, (kind,), {"name": name, "real": resolve(info.agent)})


class SimRuntime:
    """Simulated runtime.

    Options: ``faults`` (texts), ``store`` (directory of the simulator), ``arithmetic`` ("" is float32).
    """

    # Class of the real runtime, imported before workers are forked: the import takes a hundred times as long as a fork.
    real: Any
    name: str

    def __init__(self, options: dict[str, Any]) -> None:
        self._inner = self.real(options)
        self._faults = [parse(text) for text in options.get("faults", ())]
        store = Path(options.get("store", ""))
        self._charges = Charges(store / "faults")
        self._clock = next((SimClock(fault, store) for fault in self._faults if fault.name == "clock"), None)
        if self._clock is not None:
            self._clock.install()
        self._conditions = SimConditions(self._faults, store / "faults")
        self._store = store
        self._arithmetic = options.get("arithmetic") or FLOAT32

    def compute_next_factor(self) -> float:
        """Return the factor by which the device's conditions slow down the next run."""
        return self._conditions.compute_next_factor()

    @classmethod
    def describe(cls) -> dict[str, Any]:
        """Return the real runtime's description."""
        described: dict[str, Any] = cls.real.describe()
        return described

    @classmethod
    def preload(cls) -> None:
        """Preload the real runtime's library."""
        getattr(cls.real, "preload", lambda: None)()

    def prepare(self, device: str) -> None:
        """Prepare the real runtime."""
        self._inner.prepare(device)

    def load(self, folder: Path, main: str, device: str, function: str) -> SimProgram:
        """Load with the real runtime, and trigger the faults of the load."""
        faults = [fault for fault in self._faults if is_affecting(fault, folder / main)]
        self.trigger_at("load", faults)
        if self._arithmetic != FLOAT32:
            main = self.convert_arithmetic(folder, main, self._arithmetic)
        reloaded = any(fault.keys.get("when") == "reload" for fault in faults) and not self._charges.is_first(
            f"load.{digest_file(folder / main).replace(':', '-')}"
        )
        size = (folder / main).stat().st_size
        program = self._inner.load(folder, main, device, function)
        for fault in faults:
            if fault.name == "corrupt":
                _check_output(fault, program.outputs)
                if fault.keys["when"] == "profile" and not getattr(program, "profile_has_outputs", True):
                    raise UsageError("fault corrupt: when=profile needs a runtime with a profiler that returns outputs")
        return SimProgram(self, program, faults, reloaded=reloaded, size=size)

    def convert_arithmetic(self, folder: Path, main: str, arithmetic: str) -> str:
        """Convert the program to an arithmetic. Return the main file, relative to the directory.

        IREE programs contain the arithmetic: the board's compile flags select it.

        Raises:
            LoadFailed: the simulator cannot change the arithmetic of this runtime.
        """
        if self.name != "iree":
            raise LoadFailed(
                f"the runtime {self.name} cannot compute in {arithmetic} on a simulated board",
                hint="use the runtime iree or onnxruntime, or a board without [simulator] arithmetic",
            )
        return main

    def trigger_at(self, at: str, faults: Sequence[Fault], positions: range | None = None) -> None:
        """Trigger the faults of ``run`` or ``load``.

        Args:
            faults: faults that affect the program.
            positions: positions of a call of a decoder. Each such call counts as a run.
        """
        for fault in faults:
            here = fault.name in ("crash", "hang", "kill-agent") and fault.keys["at"] == at
            if here and fault.keys["position"] >= 0:
                here = positions is not None and fault.keys["position"] in positions
            if here and self._charges.should_fire(fault):
                self._trigger(fault)
            if at == "run" and fault.name == "wedge" and self._charges.is_wedged(fault):
                if fault.keys["how"] == "hang":
                    _hang()
                raise RunFailed("simulated: the device is stuck", hint="reset the board: `hil board recover BOARD`")
        if at == "run" and self._clock is not None:
            self._clock.jump()

    def profile_fault(self) -> str:
        """Return the fault of the profiling tool, or ""."""
        faults = [fault for fault in self._faults if fault.name == "profile"]
        return next((str(fault.keys["how"]) for fault in faults if self._charges.should_fire(fault)), "")

    def displace(self, placement: Placement | None) -> Placement | None:
        """Report a share of the program's nodes on a different device, if the ``fallback`` fault is set."""
        for fault in self._faults:
            if fault.name == "fallback" and self._charges.should_fire(fault):
                return _displace(placement or (), fault.keys["share"])
        return placement

    def corrupt(
        self,
        arrays: Sequence[Array],
        outputs: Sequence[TensorSpec],
        number: int,
        faults: Sequence[Fault],
        *,
        reloaded: bool,
        profiled: bool,
    ) -> list[Array]:
        """Flip bits in the outputs if the ``corrupt`` fault is set.

        Args:
            arrays: outputs of the run.
            outputs: specs of the outputs.
            number: number of the run since the program was loaded, from 0.
            faults: faults that affect the program.
            reloaded: whether the program was loaded before.
            profiled: whether the run is part of a profiling pass.
        """
        damaged = list(arrays)
        for fault in faults:
            if fault.name != "corrupt":
                continue
            position = _find_position(fault, outputs)
            met = {"always": True, "reload": reloaded, "profile": profiled}[fault.keys["when"]]
            if position is not None and met and _is_striking(fault, number) and self._charges.should_fire(fault):
                damaged[position] = _flip(damaged[position], fault.keys["elements"])
        return damaged

    def _trigger(self, fault: Fault) -> None:
        if fault.name == "kill-agent":
            end_agent(self._store)
        if fault.name == "hang":
            _hang()
        print(f"simulated {fault.keys['signal']}", file=sys.stderr, flush=True)
        if fault.keys["signal"] == "SIGSEGV":
            ctypes.string_at(0)
        os.kill(os.getpid(), signal.Signals[fault.keys["signal"]])
        # The kernel may deliver the signal to a different thread, so this thread must not continue.
        time.sleep(3600)


def _hang() -> NoReturn:
    print("simulated hang", file=sys.stderr, flush=True)
    while True:
        time.sleep(3600)


class SimPackageRuntime(SimRuntime):
    """Runtime of a package on a simulated device. The runtime itself computes in the device's arithmetic.

    The runtime receives the arithmetic in its options. Its class lists the supported arithmetics.
    """

    def convert_arithmetic(self, folder: Path, main: str, arithmetic: str) -> str:
        """Return the program unchanged. Raises LoadFailed if the runtime does not support the arithmetic."""
        supported = tuple(getattr(self.real, "arithmetics", ()))
        if arithmetic not in supported:
            raise LoadFailed(
                f"the runtime {self.name} cannot compute in {arithmetic} on a simulated board",
                hint=f"supported: {', '.join((FLOAT32, *supported))}; a package lists arithmetics in the attribute "
                "`arithmetics` of its runtime (docs/extending.md)",
            )
        return main


class SimOnnxRuntime(SimRuntime):
    """ONNX Runtime on a simulated device. The device's arithmetic is written into the model when it is loaded."""

    def convert_arithmetic(self, folder: Path, main: str, arithmetic: str) -> str:
        """Rewrite the model for the arithmetic.

        The new model is in memory until this process ends: a sandboxed worker cannot write to the program's directory.
        """
        import onnx

        from hil.formats.onnx_arithmetic import rewrite
        from hil.formats.onnx_functions import inline_functions

        model = onnx.load(folder / main)
        opset = next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), 0)
        if arithmetic == "bfloat16" and opset < _BFLOAT16_OPSET:
            raise LoadFailed(f"the simulator cannot compute opset {opset} in bfloat16: Cast supports it from opset 13")
        rewritten = rewrite(inline_functions(model) if model.functions else model, arithmetic)
        fd = os.memfd_create(f"{arithmetic}-{main}"[:200], os.MFD_CLOEXEC)
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(rewritten.SerializeToString())
        return f"/proc/self/fd/{fd}"


class SimProgram:
    """Real program with faults."""

    def __init__(
        self,
        runtime: SimRuntime,
        inner: Any,
        faults: Sequence[Fault] = (),
        *,
        reloaded: bool = False,
        size: int = 0,
    ) -> None:
        self._runtime = runtime
        self._inner = inner
        self._faults = faults
        self._reloaded = reloaded
        self._slowdown = max((fault.keys["factor"] for fault in faults if fault.name == "slowdown"), default=1.0)
        self._pace_s = max((fault.keys["seconds"] for fault in faults if fault.name == "pace"), default=0.0)
        self._runs = 0  # number of runs since the program was loaded
        if hasattr(inner, "profile"):  # profiling is optional: see hil.agent.runtimes.Program
            self.profile = self._profile
        if hasattr(inner, "open_function"):
            self.open_function = self._open_function
        counter = next((fault.keys for fault in faults if fault.name == "counter"), None)
        if counter is not None:
            self._count, self._count_share = counter["each"] * size * self._slowdown, counter["share"]
            self._count_random = random.Random(counter["seed"])
            self.count_instructions, self.instruction_counter = self._count_instructions, SIMULATED
        self._real: Placement | None = None
        self._placed: Placement | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # inputs, outputs, bind, and renew if the program has it

    def run(self) -> None:
        """Run the real program, and trigger the faults of the run."""
        self.trigger()
        with self._slow_down():
            self._inner.run()

    def _open_function(self, name: str) -> SimProgram:
        """Open another function. Faults of runs and outputs affect only the function that was loaded."""
        timing = [fault for fault in self._faults if fault.name in ("slowdown", "pace")]
        return SimProgram(self._runtime, self._inner.open_function(name), timing)

    def stepped(self, plan: StepsPlan) -> SimSteps:
        """Return the program as a stepped program with faults.

        Raises UsageError if a fault can never affect the program.
        """
        return SimSteps(self, plan, self._faults)

    def trigger(self, positions: range | None = None) -> None:
        """Trigger the faults of a run, or of a decoder's call for these positions."""
        self._runtime.trigger_at("run", self._faults, positions)
        self._runs += 1

    def step(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Call the real program once, after :meth:`trigger`. With the ``corrupt`` fault, the values are arrays."""
        with self._slow_down():
            values = make_step_program(self._inner).step(inputs)
        if not any(fault.name == "corrupt" for fault in self._faults):
            return values
        return self._corrupt([self.to_array(place, value) for place, value in enumerate(values)], profiled=False)

    def to_array(self, place: int, value: Any) -> Array:
        """Return a value of a step as an array. A fault may have converted the value already."""
        return value if isinstance(value, np.ndarray) else make_step_program(self._inner).to_array(place, value)

    @contextlib.contextmanager
    def _slow_down(self) -> Iterator[None]:
        """Extend a run by the ``slowdown`` and ``pace`` faults, and by the device's conditions."""
        conditions = self._runtime.compute_next_factor()
        factor = self._slowdown * conditions
        start = time.perf_counter_ns()
        yield
        if factor > 1:
            end = start + (time.perf_counter_ns() - start) * factor
            while time.perf_counter_ns() < end:
                pass
        if self._pace_s:
            time.sleep(max(start / 1e9 + self._pace_s * conditions - time.perf_counter_ns() / 1e9, 0.0))

    def _profile(self, warmup: int, iterations: int, folder: Path, tool: Path | None, check: Check) -> list[Path]:
        """Profile the real program, unless the profiling tool has a fault."""
        how = self._runtime.profile_fault()
        if how in ("missing", "crash", "hang"):
            script = folder / "simulated-profiler"
            if how != "missing":
                script.write_text(_CRASHES if how == "crash" else _HANGS)
                script.chmod(0o700)
            run_command([str(script)], folder, folder / "profile")

        def check_corrupted(arrays: Sequence[Array]) -> None:
            self._runs += 1
            check(self._corrupt(arrays, profiled=True))

        files: list[Path] = self._inner.profile(warmup, iterations, folder, tool, check_corrupted)
        if how == "truncate":
            for file in files:
                if file.name != CLOCK_FILE:
                    os.truncate(file, file.stat().st_size // 2)
        return files

    def _count_instructions(self) -> int:
        """Return the simulated instructions of the last run."""
        return int(self._count * (1 + self._count_share * self._count_random.uniform(-1, 1)))

    def placement(self) -> Placement | None:
        """Return the real program's placement, changed by the ``fallback`` fault."""
        real = self._inner.placement() if hasattr(self._inner, "placement") else None
        if self._placed is None or real != self._real:
            self._real, self._placed = real, self._runtime.displace(real)
        return self._placed

    def fetch(self) -> list[Array]:
        """Return the real program's outputs, changed by the ``corrupt`` fault."""
        return self._corrupt(self._inner.fetch(), profiled=False)

    def _corrupt(self, arrays: Sequence[Array], *, profiled: bool) -> list[Array]:
        number = self._runs - 1
        return self._runtime.corrupt(
            arrays, self.outputs, number, self._faults, reloaded=self._reloaded, profiled=profiled
        )


def _is_striking(fault: Fault, number: int) -> bool:
    """Return True if the ``corrupt`` fault applies to this run."""
    if fault.keys["iteration"] not in (-1, number):
        return False
    share = fault.keys["share"]
    return bool(share == 1 or random.Random(f"{fault.keys['seed']}:{number}").random() < share)


def _displace(real: Placement, share: float) -> Placement:
    nodes = max(sum(part.nodes for part in real), _MIN_NODES)
    moved = max(1, round(nodes * share))
    there = tuple(Part(part.device, nodes - moved) for part in real[:1] if moved < nodes)
    names = [f"node {number}" for number in range(moved)]
    return (*there, Part.of(_ELSEWHERE, names, elsewhere=True, why=dict.fromkeys(names, "simulated: fault fallback")))


def _check_output(fault: Fault, outputs: Sequence[TensorSpec]) -> None:
    """Reject a fault that can never affect this program. Otherwise, a run would pass without the configured fault."""
    names, which = _list_names(outputs), fault.keys["output"]
    position = _find_position(fault, outputs)
    if position is None:
        if fault.keys["others"] == "spare":
            return
        there = format_expected(
            (f"{number} ({name})" for number, name in enumerate(names)), "use output=N with one of: "
        )
        raise UsageError(
            f"fault corrupt: output {which} not found in the program",
            hint=f"{there}{there and '; or '}add others=spare to ignore programs without this output",
        )
    if outputs[position].dtype == "string":
        raise UsageError(
            f"fault corrupt: output {position} ({names[position]}) has strings; the fault supports only numbers"
        )


def _find_position(fault: Fault, outputs: Sequence[TensorSpec]) -> int | None:
    """Return the index of the output that the fault changes, or None if the program does not have it."""
    names, which = _list_names(outputs), fault.keys["output"]
    if isinstance(which, str):
        return names.index(which) if which in names else None
    return which if which < len(names) else None


def _list_names(outputs: Sequence[TensorSpec]) -> list[str]:
    return [spec.name.removeprefix(SCALAR_PREFIX) for spec in outputs]


def _flip(array: Array, elements: int) -> Array:
    """Return a copy with the top bits of evenly spread elements flipped."""
    damaged = np.array(array)
    if not damaged.size:
        return damaged
    flat = damaged.reshape(-1)
    places = np.unique(np.linspace(0, flat.size - 1, min(elements, flat.size)).astype(np.int64))
    if damaged.dtype.kind == "b":
        flat[places] = ~flat[places]
        return damaged
    raw = flat.view(np.uint8).reshape(flat.size, damaged.dtype.itemsize)
    raw[places, -1] ^= 0x40
    return damaged
