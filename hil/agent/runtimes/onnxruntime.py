"""Run ONNX files with ONNX Runtime. External data is in the same directory."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from hil.agent.runtimes import Check, ClockPairs, Runtime
from hil.agent.runtimes.onnxruntime_log import ProviderLog, read_provider_log
from hil.agent.runtimes.onnxruntime_providers import (
    CPU_PROVIDER,
    ProviderDevice,
    find_device,
    list_hardware,
    list_providers,
    open_session,
)
from hil.core.files import read_file
from hil.core.results import Part, Placement
from hil.core.tensors import Array, TensorSpec
from hil.errors import LoadFailed, RunFailed
from hil.formats.ort_values import copy_from_ort, make_node_spec, to_ort

# Output file of a profiling pass.
PROFILE_FILE = "onnxruntime.json"
DEFAULT_DEVICE = CPU_PROVIDER
# Session option that records the provider of each node; supported since ONNX Runtime 1.24.
_ASSIGNMENT = "session.record_ep_graph_assignment_info"
_KERNEL = "_kernel_time"
_ERRORS = 3  # minimum severity of ONNX Runtime's log messages
# Minimal model: float32[1] -> Identity.
_IDENTITY = bytes.fromhex(
    "080312003a370a100a017812017922084964656e746974791201675a0f0a0178120a0a08080112040a020801620f0a0179120a0a08080112040a02"
    "080142040a001007"
)


class OnnxRuntime(Runtime):
    """Runtime for .onnx files. A device is an execution provider."""

    def __init__(self, options: dict[str, Any]) -> None:
        ort.set_default_logger_severity(_ERRORS)

    @staticmethod
    def describe() -> dict[str, Any]:
        """Return the version and the execution providers, the CPU first."""
        providers = list_providers()
        return {"version": ort.__version__, "devices": providers, "device_details": list_hardware(providers)}

    @staticmethod
    def preload() -> None:
        """Create a first session, which registers the operators.

        In a worker, this would take longer than creating the program's session.
        """
        ort.set_default_logger_severity(_ERRORS)
        options = ort.SessionOptions()
        # Threads do not survive a fork.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = _ERRORS
        ort.InferenceSession(_IDENTITY, options, providers=[DEFAULT_DEVICE])

    def load(self, folder: Path, main: str, device: str, function: str) -> OnnxProgram:
        """Create a session for the model."""
        provider = find_device(device)

        def make(options: ort.SessionOptions) -> ort.InferenceSession:
            options.log_severity_level = _ERRORS
            if provider.name != DEFAULT_DEVICE:
                options.add_session_config_entry(_ASSIGNMENT, "1")
            return open_session(folder / main, provider, options)

        try:
            session = make(ort.SessionOptions())
        except LoadFailed:
            raise
        except Exception as error:
            text = str(error).replace(str(folder) + "/", "")
            where = "" if provider.name == DEFAULT_DEVICE else f" on {provider.name}"
            raise LoadFailed(f"ONNX Runtime cannot load {main}{where}: {text[:400]}", detail=text) from error
        source = _Source(folder / main, provider, make)
        if provider.name not in session.get_providers():
            # ONNX Runtime logs the error, and creates the session without the provider.
            errors = source.read_log().errors
            raise LoadFailed(
                f"ONNX Runtime cannot open {provider.name}: {(errors or ['see the log of the worker'])[0][:400]}",
                hint="install the driver and the libraries of this provider on the board, or use a different device",
                detail="\n".join(errors),
            )
        return OnnxProgram(session, source, function)


@dataclass(frozen=True)
class _Source:
    """What a session is created from."""

    path: Path
    provider: ProviderDevice
    make: Callable[[ort.SessionOptions], ort.InferenceSession]

    def read_log(self) -> ProviderLog:
        """Return the facts of the log of another session's creation."""
        with tempfile.TemporaryDirectory(prefix="hil-placement-") as folder:
            return read_provider_log(self.path, self.provider, Path(folder))


class OnnxProgram:
    """ONNX Runtime session. Its graph is the only function."""

    def __init__(
        self,
        session: ort.InferenceSession,
        source: _Source,
        function: str,
    ) -> None:
        self._session = session
        self._source = source
        self._provider = source.provider.name
        self._placed: Placement | None = None
        self.function = function
        self.inputs = _read_specs("input", session.get_inputs())
        self.outputs = _read_specs("output", session.get_outputs())
        self._names = [spec.name for spec in self.outputs]
        self._feeds: dict[str, Any] = {}
        self._arrays: list[Array] = []
        self._values: Any = None

    def bind(self, inputs: list[Array]) -> None:
        """Wrap the inputs as OrtValues, which share the arrays' memory."""
        self._arrays = inputs
        try:
            self._feeds = {spec.name: to_ort(array) for spec, array in zip(self.inputs, inputs, strict=True)}
        except Exception as error:
            raise RunFailed(f"ONNX Runtime's Python API does not support an input: {error}") from error

    def run(self) -> None:
        """Run the session."""
        self._values = self._run(self._session, self._feeds)

    def step(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run the session with arrays or OrtValues."""
        try:
            feeds = {
                spec.name: to_ort(value) if isinstance(value, np.ndarray) else value
                for spec, value in zip(self.inputs, inputs, strict=True)
            }
        except Exception as error:
            raise RunFailed(f"ONNX Runtime's Python API does not support an input: {error}") from error
        values = self._run(self._session, feeds)
        return [ort.OrtValue(values[number]) for number in range(len(self.outputs))]

    def to_array(self, place: int, value: Any) -> Array:
        """Return an OrtValue as an array."""
        return self._read_array(self.outputs[place], value)

    def placement(self) -> Placement:
        """Return the provider of each node, from the session if it supports that, else from a profiled run."""
        if self._placed is None:
            self._placed = self._place()
        return self._placed

    def _place(self) -> Placement:
        providers = self._session.get_providers()
        if len(providers) == 1:
            return (Part(providers[0], elsewhere=providers[0] != self._provider),)
        if hasattr(self._session, "get_provider_graph_assignment_info"):
            graphs = self._session.get_provider_graph_assignment_info()
            nodes = [(graph.ep_name, node.name, node.op_type) for graph in graphs for node in graph.get_nodes()]
        else:
            nodes = self._profile_nodes()
        log = self._source.read_log() if any(node[0] != self._provider for node in nodes) else ProviderLog()
        return _group_nodes(nodes, self._provider, log)

    def _profile_nodes(self) -> list[tuple[str, str, str]]:
        """Return (provider, name, operator) of each node that a run of a separate session executed."""
        with tempfile.TemporaryDirectory(prefix="hil-placement-") as folder:
            session = self._open_profiling_session(Path(folder))
            self._run(session, self._feeds)
            events = json.loads(read_file(Path(session.end_profiling())))
        nodes = (
            (event["args"]["provider"], event["name"].removesuffix(_KERNEL), event["args"]["op_name"])
            for event in events
            if event.get("cat") == "Node" and event["name"].endswith(_KERNEL)
        )
        return list(dict.fromkeys(nodes))  # loops execute a node repeatedly

    def _open_profiling_session(self, folder: Path) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "pass")
        return self._source.make(options)

    def profile(self, warmup: int, iterations: int, folder: Path, tool: Path | None, check: Check) -> list[Path]:
        """Profile a separate session, so that tracing does not slow down normal runs."""
        try:
            session = self._open_profiling_session(folder)
            # Origin of the profile's timestamps.
            start_ns = session.get_profiling_start_time_ns()
            clocks = ClockPairs(lambda: time.time_ns() - start_ns)
            clocks.read_clocks()
            for _ in range(warmup + iterations):
                check(self._collect_arrays(self._run(session, self._feeds)))
            clocks.read_clocks()
            written = Path(session.end_profiling())
            written.rename(folder / PROFILE_FILE)
        except RunFailed:
            raise
        except Exception as error:
            raise RunFailed(
                f"ONNX Runtime failed to profile the model: {str(error)[:400]}", detail=str(error)
            ) from error
        return [folder / PROFILE_FILE, clocks.write(folder)]

    def _run(self, session: ort.InferenceSession, feeds: Mapping[str, Any]) -> Any:
        try:
            return session._sess.run_with_ort_values(
                {name: value._get_c_value() for name, value in feeds.items()}, self._names, None
            )
        except Exception as error:
            raise RunFailed(f"ONNX Runtime failed to run the model: {str(error)[:400]}", detail=str(error)) from error

    def fetch(self) -> list[Array]:
        """Return the outputs of the last run."""
        return self._collect_arrays(self._values)

    def _collect_arrays(self, values: Any) -> list[Array]:
        arrays = []
        for number, spec in enumerate(self.outputs):
            # Use indices: creating an iterator over ONNX Runtime's vector takes 40 us.
            arrays.append(self._read_array(spec, ort.OrtValue(values[number])))
        return arrays

    def _read_array(self, spec: TensorSpec, value: ort.OrtValue) -> Array:
        if not value.is_tensor():
            raise RunFailed(f"output {spec.name} is not a tensor")
        return copy_from_ort(value, spec.dtype)


def _group_nodes(nodes: Iterable[tuple[str, str, str]], asked: str, log: ProviderLog) -> Placement:
    """Group nodes, given as (provider, name, operator), into one part per provider. The requested provider is first."""
    found: dict[str, list[str]] = {}
    why = {}
    for provider, name, operator in nodes:
        label = f"{name} ({operator})" if name else operator
        found.setdefault(provider, []).append(label)
        if provider != asked and (reason := log.find_reason(name, operator)):
            why[label] = reason
    ordered = sorted(found, key=lambda provider: (provider != asked, provider))
    return tuple(Part.of(one, found[one], elsewhere=one != asked, why={} if one == asked else why) for one in ordered)


def _read_specs(kind: str, nodes: Any) -> tuple[TensorSpec, ...]:
    specs = []
    for node in nodes:
        spec = make_node_spec(node)
        if spec is None:
            raise LoadFailed(f"{kind} {node.name} is a {node.type}: hil passes tensors only")
        specs.append(spec)
    return tuple(specs)
