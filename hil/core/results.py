"""Types of values that pipeline stages exchange, outcomes of a case, and program placement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hil import errors
from hil.core.instructions import InstructionCounts
from hil.core.placement_reasons import MAX_NAMES, SHOWN_NAMES, PlacementReason, count_nodes, group_reasons
from hil.core.repetition import Repetition
from hil.core.tensors import Array, TensorSpec
from hil.errors import RanElsewhere


class Stage(str, Enum):
    """Pipeline stages, in order."""

    IMPORT = "import"
    COMPILE = "compile"
    PUSH = "push"
    LOAD = "load"
    RUN = "run"
    REFER = "refer"
    COMPARE = "compare"
    REPORT = "report"


class Outcome(str, Enum):
    """Outcome of a test case."""

    PASS = "PASS"
    FAIL = "FAIL"
    BLIND = "BLIND"
    UNSTABLE = "UNSTABLE"
    IMPORT_ERROR = "IMPORT_ERROR"
    COMPILE_ERROR = "COMPILE_ERROR"
    COMPILE_CRASH = "COMPILE_CRASH"
    LOAD_ERROR = "LOAD_ERROR"
    RUN_ERROR = "RUN_ERROR"
    RUN_CRASH = "RUN_CRASH"
    TIMEOUT = "TIMEOUT"
    FALLBACK = "FALLBACK"
    REFERENCE_ERROR = "REFERENCE_ERROR"
    BOARD_LOST = "BOARD_LOST"
    BOARD_BUSY = "BOARD_BUSY"
    BOARD_UNFIT = "BOARD_UNFIT"
    BLOB_DAMAGED = "BLOB_DAMAGED"
    BOARD_REFUSED = "BOARD_REFUSED"
    BOARD_UNREACHABLE = "BOARD_UNREACHABLE"
    SKIP = "SKIP"
    XFAIL = "XFAIL"
    XPASS = "XPASS"

    @property
    def exit_code(self) -> int:
        """Exit code of a command with this outcome as the most severe outcome."""
        if self in (Outcome.PASS, Outcome.SKIP, Outcome.XFAIL):
            return errors.EXIT_OK
        if self in (Outcome.FAIL, Outcome.BLIND, Outcome.UNSTABLE, Outcome.XPASS):
            return errors.EXIT_FAIL
        return errors.EXIT_BOARD if self in BOARD_OUTCOMES else errors.EXIT_STAGE


WRONG = frozenset({Outcome.FAIL, Outcome.BLIND, Outcome.UNSTABLE})
"""Outcomes of a program that ran, but with wrong or unreliable outputs."""

BOARD_OUTCOMES = frozenset(
    {
        Outcome.BOARD_LOST,
        Outcome.BOARD_BUSY,
        Outcome.BOARD_UNFIT,
        Outcome.BLOB_DAMAGED,
        Outcome.BOARD_REFUSED,
        Outcome.BOARD_UNREACHABLE,
    }
)
"""Outcomes caused by the board or its connection rather than the model."""


NEVER_IN = frozenset({Outcome.BOARD_REFUSED, Outcome.BOARD_UNREACHABLE})
"""Outcomes of an attempt that never reached the board. Such attempts are not recorded."""


def exit_code_of(outcomes: Iterable[Outcome]) -> int:
    """Return an exit code for many outcomes: the most severe of 4, 3, 1, 0; or 5 if nothing ran."""
    ran = [outcome for outcome in outcomes if outcome is not Outcome.SKIP]
    return max((outcome.exit_code for outcome in ran), default=errors.EXIT_NOTHING_RAN)


# Exit codes by severity, least severe first. Cancelled counts as interrupted. The result is "nothing ran", the least
# severe code, only if all codes are "nothing ran".
_GRAVITY = (
    errors.EXIT_NOTHING_RAN,
    errors.EXIT_OK,
    errors.EXIT_FAIL,
    errors.EXIT_USAGE,
    errors.EXIT_STAGE,
    errors.EXIT_BOARD,
    errors.EXIT_INTERNAL,
    errors.EXIT_INTERRUPTED,
)


def choose_exit_code(codes: Sequence[int]) -> int:
    """Return an exit code for multiple runs: the most severe of interrupted, 70, 4, 3, 2, 1, 0, 5, in this order.

    Unknown codes count as 4.
    """
    known = [code if code in _GRAVITY else errors.EXIT_BOARD for code in codes]
    return max(known, key=_GRAVITY.index, default=errors.EXIT_NOTHING_RAN)


@dataclass(frozen=True)
class Timings:
    """Wall time of each stage on the host, in seconds; None for stages that did not run.

    :class:`RunResult` has the device time, measured by the board's clock.
    """

    boot_s: float | None = None  # from switching the power to the boot pattern on the console
    import_s: float | None = None
    compile_s: float | None = None
    push_s: float | None = None
    load_s: float | None = None
    warmup_s: float | None = None
    run_s: float | None = None
    fetch_s: float | None = None
    refer_s: float | None = None
    compare_s: float | None = None


# Dtype of an output's noise. The noise is each element's possible rounding difference, as a power of two in one byte.
NOISE_DTYPE = "float8_e8m0fnu"


class Relation(str, Enum):
    """Relation of a reference to the judged program: the components that both share.

    The members are ordered by evidence, the strongest first.
    """

    INDEPENDENT = "independent"  # shares at most the model reader
    SAME_LIBRARY = "same library"  # shares kernels or the build
    SELF_CHECK = "self-check"  # shares importer and compiler, so agreement proves nothing

    @property
    def rank(self) -> int:
        """Position in order of evidence: 0 is the strongest."""
        return list(Relation).index(self)

    def named(self, source: str) -> str:
        """Return a reference's name, with its relation unless independent: ``onnxruntime (same library)``."""
        return source if self is Relation.INDEPENDENT else f"{source} ({self.value})"


@dataclass(frozen=True)
class Deviation:
    """Deviation that an arithmetic causes in a group of output elements."""

    rms: float  # root mean square of the run with the largest deviation
    largest: float


@dataclass(frozen=True)
class Control:
    """Deviation that a declared arithmetic causes in an output, compared with float32 on the host."""

    arithmetic: str
    source: str  # library and version that computed it
    whole: Deviation  # deviation of all elements that do not jump
    # axis -> deviation for each index along the axis; None for an index with too few elements.
    axes: Mapping[int, tuple[Deviation | None, ...]] = field(default_factory=dict)
    # base-16 exponent -> deviation of the elements with this magnitude.
    sizes: Mapping[int, Deviation] = field(default_factory=dict)
    # flat index of a jumping element -> value in each run. An element jumps if an operator such as Floor or ArgMax
    # decides differently in the arithmetic, or if a value overflows.
    jumps: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    jumping: int = 0  # number of jumping elements; ``jumps`` contains only the first
    clipped: tuple[str, ...] = ()  # model weights with values that exceed the arithmetic's range


@dataclass(frozen=True)
class RunResult:
    """Result of running a program on a board or through a reference."""

    source: str  # library or board with version: ``sim: iree 3.13.0 local-task`` or ``onnxruntime 1.31.1``
    outputs: Mapping[str, Array]  # output name -> tensor, in the program's order
    # (start, end) of each timed iteration on the device's monotonic clock. If only durations are known, the iterations
    # are placed consecutively from 0.
    iterations_ns: tuple[tuple[int, int], ...] = ()
    peak_memory_bytes: int | None = None  # the worker's peak resident memory, or None if not measured
    # Context of the measurement: board, runtime, agent, clocks, temperatures and more.
    provenance: Mapping[str, Any] = field(default_factory=dict)
    cold: bool = False  # True if the first iteration was the program's first run after loading
    # output name -> a reference's noise with the output's shape and NOISE_DTYPE, if measured.
    noise: Mapping[str, Array] = field(default_factory=dict)
    relation: Relation = Relation.INDEPENDENT  # a reference's relation to the judged program
    # Distinct answers over all iterations; None if not compared.
    repetition: Repetition | None = None
    # Instructions of each timed iteration; None if not requested and the board's clock does not count them.
    instructions: InstructionCounts | None = None
    # output name -> deviation from the board's arithmetic, for reference outputs with a control.
    control: Mapping[str, Control] = field(default_factory=dict)
    peak_device_memory_bytes: int | None = None  # memory of the device; None if neither runtime nor driver report it

    @property
    def device_ns(self) -> list[int]:
        """Duration of each timed iteration, in nanoseconds on the device's clock."""
        return [end - start for start, end in self.iterations_ns]


@dataclass(frozen=True)
class Tolerance:
    """``|a-b| <= atol + rtol*|b|``, where b is the reference."""

    rtol: float
    atol: float


@dataclass(frozen=True)
class Model:
    """Imported model: the result of stage *import*."""

    name: str
    format: str  # ``onnx``, ``mlir`` or ``vmfb`` (already compiled)
    path: Path
    # All files of the model, including external data: name in the program's directory -> path.
    files: Mapping[str, Path]
    digest: str  # digest over all files, ``blake3:...``
    function: str = ""
    # inputs, outputs: specs in order; None if only the board can determine them (``vmfb``).
    inputs: tuple[TensorSpec, ...] | None = None
    outputs: tuple[TensorSpec, ...] | None = None
    # input name -> (low, high) if the model limits the input's values.
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)  # user's values for symbolic dimensions
    has_float64: bool = True  # True if the model computes with float64, or if this is unknown
    # Producer, opset versions and similar, for the record. ``unseen_state`` lists state that persists between runs but
    # is not returned. ``random`` has the ``nodes`` that draw random numbers, and the ``outputs`` that depend on them.
    producer: Mapping[str, Any] = field(default_factory=dict)
    cached: bool = False

    @property
    def unseen(self) -> str:
        """Note on state that comparisons cannot check, because the model does not return it; "" without such state."""
        state = ", ".join(self.producer.get("unseen_state", ()))
        return state and f"the model keeps state between runs ({state}): hil compares only the outputs, not this state"

    @property
    def random(self) -> tuple[str, ...]:
        """Nodes that draw random numbers on which outputs depend. Even with a seed, backends draw different numbers."""
        return tuple(self.producer.get("random", {}).get("nodes", ()))

    @property
    def random_outputs(self) -> tuple[str, ...]:
        """Outputs that depend on the random numbers of the nodes in :attr:`random`."""
        return tuple(self.producer.get("random", {}).get("outputs", ()))


@dataclass(frozen=True)
class Artifact:
    """Compiled program that a runtime can load: the result of stage *compile*."""

    runtime: str  # target runtime: ``iree`` or ``onnxruntime``
    main: str
    files: Mapping[str, Path]
    digests: Mapping[str, str]
    function: str
    compiler: str  # name and version, or ``none`` without a compiler
    flags: tuple[str, ...] = ()  # compiler flags, including the target
    # inputs, outputs: specs if known; specs from the loaded program take precedence.
    inputs: tuple[TensorSpec, ...] | None = None
    outputs: tuple[TensorSpec, ...] | None = None
    # entry point -> inputs and outputs, if more than ``function`` is known.
    methods: Mapping[str, tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]] = field(default_factory=dict)
    cached: bool = False
    seconds: float = 0.0  # compile time (0 when cached)
    log: Path | None = None
    # Compiler notes, as JSON values; ``text`` is a line for display.
    notes: Mapping[str, Any] = field(default_factory=dict)
    # Values for the inputs that the program has in addition to the model's inputs. These additional inputs are at the
    # end of ``inputs``, in the same order.
    carried: Mapping[str, Array] = field(default_factory=dict, compare=False)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Output names, if known. Compiled programs may lack the output names of their models."""
        return tuple(spec.name for spec in self.outputs or ())


# ExecuTorch's portable kernels and its backends: name in `--backend=` -> name in programs. If the flag lists multiple
# backends, later backends may run operators that earlier backends do not support.
PORTABLE = "portable"
BACKEND_FLAG = "--backend="
BACKENDS = {"xnnpack": "XnnpackBackend", PORTABLE: PORTABLE}
# For other backends: the name that programs use. The compiler appends this flag.
DELEGATE_FLAG = "--delegate="


@dataclass(frozen=True)
class Part:
    """Nodes of a program that ran on the same device, provider or delegate."""

    device: str  # the runtime's name: ``CPUExecutionProvider``, ``local-task``, ``XnnpackBackend``
    nodes: int = 0  # number of nodes; 0 if the runtime reports only the whole program
    names: tuple[str, ...] = ()  # node names, if reported; at most :data:`MAX_NAMES`
    elsewhere: bool = False  # True if this is not the requested device
    # Why these nodes did not run on the requested device; empty if the runtime does not report it.
    reasons: tuple[PlacementReason, ...] = ()

    @classmethod
    def of(
        cls,
        device: str,
        names: Sequence[str],
        *,
        elsewhere: bool = False,
        why: Mapping[str, str] = MappingProxyType({}),
    ) -> Part:
        """Create a part from node names. Stores at most :data:`MAX_NAMES`.

        Args:
            why: node name -> the runtime's reason. Nodes without an entry have no reported reason.
        """
        reasons = group_reasons((why[name], name) for name in names if name in why)
        return cls(device, len(names), tuple(names[:MAX_NAMES]), elsewhere, reasons)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Part:
        """Create a part from the result of :meth:`to_json`."""
        reasons = tuple(map(PlacementReason.from_json, values.get("reasons", ())))
        return cls(values["device"], values["nodes"], tuple(values["names"]), values["elsewhere"], reasons)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {
            "device": self.device,
            "nodes": self.nodes,
            "names": list(self.names),
            "elsewhere": self.elsewhere,
            "reasons": [reason.to_json() for reason in self.reasons],
        }


Placement = tuple[Part, ...]


@dataclass(frozen=True)
class RequestedDevice:
    """Device that a program should run on."""

    device: str
    binding: bool  # True if explicitly requested; a case then fails if no node ran on the device
    # True for a backend chosen at compile time, unknown to the runtime.
    is_backend: bool = False

    @classmethod
    def of(cls, runtime: str, flags: Sequence[str], device: str) -> RequestedDevice:
        """Determine the device from the board's config and the compiler's flags.

        Args:
            flags: the program's compiler flags.
            device: device from the board's config; "" if not configured.
        """
        if runtime != "executorch":
            return cls(device, bool(device))
        # ExecuTorch has a single device, the CPU, so the flags select a backend.
        named = [flag.removeprefix(BACKEND_FLAG) for flag in flags if flag.startswith(BACKEND_FLAG)]
        first, _, rest = named[-1].partition(",") if named else ("", "", "")
        called = next((one.removeprefix(DELEGATE_FLAG) for one in flags if one.startswith(DELEGATE_FLAG)), first)
        return cls(BACKENDS.get(first, called), bool(first) and not rest, is_backend=bool(first))

    def mark(self, placement: Placement) -> Placement:
        """Mark the parts that ran elsewhere, for runtimes that cannot detect this."""
        if not self.is_backend or any(part.device == self.device for part in placement):
            return placement
        return tuple(replace(part, elsewhere=True) for part in placement)

    def check(self, placement: Placement | None, *, no_fallback: bool) -> str:
        """Check that a program ran on the requested device. Return a note on the parts that ran elsewhere, or "".

        Args:
            placement: marked placement; None if the runtime does not report it.

        Raises:
            RanElsewhere: no part ran on the device; or, with ``no_fallback``, a part ran elsewhere.
        """
        if placement is None:
            if no_fallback:
                raise RanElsewhere(
                    "the runtime does not report the device that ran the program",
                    hint="omit --no-fallback, or use a runtime that reports devices (docs/extending.md)",
                )
            return ""
        wrong = [part for part in placement if part.elsewhere]
        if not wrong or not (self.binding or no_fallback):
            return ""
        text = f"{_share(placement, wrong)} ran on {_join_devices(wrong)}, not on {self.device or 'the default device'}"
        if len(wrong) < len(placement):
            names = [name for part in wrong for name in part.names][:SHOWN_NAMES]
            left = sum(part.nodes for part in wrong) - len(names)
            text += f": {', '.join(names)}{f' and {left} more' if left else ''}"
        elif self.binding:
            raise RanElsewhere(
                text,
                hint="the device cannot run any part of the program: select a different device, or remove the device "
                "setting",
            )
        if no_fallback:
            raise RanElsewhere(text, hint="omit --no-fallback to allow this")
        return text


def format_node_counts(placement: Iterable[tuple[str, int]]) -> str:
    """Format a placement, pairs of device and nodes: ``XnnpackBackend (1 node), portable (4 nodes)``."""
    return ", ".join(f"{device} ({count_nodes(nodes)})" if nodes else device for device, nodes in placement)


def _share(placement: Placement, wrong: Sequence[Part]) -> str:
    total, count = sum(part.nodes for part in placement), sum(part.nodes for part in wrong)
    if not count:
        return "the program"
    return f"all {count_nodes(total)}" if count == total > 1 else f"{count} of {count_nodes(total)}"


def _join_devices(parts: Sequence[Part]) -> str:
    return " and ".join(dict.fromkeys(part.device for part in parts))
