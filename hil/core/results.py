"""The values that the pipeline hands from stage to stage, the words for how a case ends, and where a program ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from hil import errors
from hil.core.repetition import Repetition
from hil.core.tensors import Array, TensorSpec
from hil.errors import RanElsewhere


class Stage(str, Enum):
    """A stage of the pipeline, in order."""

    IMPORT = "import"
    COMPILE = "compile"
    PUSH = "push"
    LOAD = "load"
    RUN = "run"
    REFER = "refer"
    COMPARE = "compare"
    REPORT = "report"


class Outcome(str, Enum):
    """What one test case ended in."""

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
    BLOB_DAMAGED = "BLOB_DAMAGED"
    BOARD_REFUSED = "BOARD_REFUSED"
    BOARD_UNREACHABLE = "BOARD_UNREACHABLE"
    SKIP = "SKIP"
    XFAIL = "XFAIL"
    XPASS = "XPASS"

    @property
    def exit_code(self) -> int:
        """The exit code that a command ends with when this is its gravest outcome."""
        if self in (Outcome.PASS, Outcome.SKIP, Outcome.XFAIL):
            return errors.EXIT_OK
        if self in (Outcome.FAIL, Outcome.BLIND, Outcome.UNSTABLE, Outcome.XPASS):
            return errors.EXIT_FAIL
        return errors.EXIT_BOARD if self in BOARD_OUTCOMES else errors.EXIT_STAGE


WRONG = frozenset({Outcome.FAIL, Outcome.BLIND, Outcome.UNSTABLE})
"""The outcomes of a program that ran, and whose answers are wrong or cannot be relied on."""

BOARD_OUTCOMES = frozenset({Outcome.BOARD_LOST, Outcome.BLOB_DAMAGED, Outcome.BOARD_REFUSED, Outcome.BOARD_UNREACHABLE})
"""The outcomes that blame the board, or the way to it, and not the model."""


NEVER_IN = frozenset({Outcome.BOARD_REFUSED, Outcome.BOARD_UNREACHABLE})
"""The outcomes of an attempt that never came to the board: nothing was lost, and nothing is kept of it."""


def exit_code_of(outcomes: Iterable[Outcome]) -> int:
    """One exit code for many outcomes: 4, 3, 1 in that order of gravity, else 0; 5 where nothing ran at all."""
    ran = [outcome for outcome in outcomes if outcome is not Outcome.SKIP]
    return max((outcome.exit_code for outcome in ran), default=errors.EXIT_NOTHING_RAN)


# Exit codes from the lightest to the gravest; what was cancelled counts as interrupted. That nothing ran is no fault of
# what ran beside it: it is the code only where it is that of all.
_GRAVITY = (
    errors.EXIT_NOTHING_RAN,
    errors.EXIT_OK,
    errors.EXIT_FAIL,
    errors.EXIT_USAGE,
    errors.EXIT_STAGE,
    errors.EXIT_BOARD,
    errors.EXIT_INTERRUPTED,
)


def gravest(codes: Sequence[int]) -> int:
    """One exit code for several runs: interrupted, then 4, 3, 2, 1, 0, 5; an unknown code counts as 4."""
    known = [code if code in _GRAVITY else errors.EXIT_BOARD for code in codes]
    return max(known, key=_GRAVITY.index, default=errors.EXIT_NOTHING_RAN)


@dataclass(frozen=True)
class Timings:
    """Wall seconds of each stage on the host, told apart; None where a stage did not take place.

    Time on the device itself is in :class:`RunResult`, measured by the board's own clock.
    """

    import_s: float | None = None
    compile_s: float | None = None
    push_s: float | None = None
    load_s: float | None = None
    warmup_s: float | None = None
    run_s: float | None = None
    fetch_s: float | None = None
    refer_s: float | None = None
    compare_s: float | None = None


# An output's noise: for each element how far it may differ for rounding alone, a power of two in one byte.
NOISE_DTYPE = "float8_e8m0fnu"


class Relation(str, Enum):
    """What a reference shares with the program that it judges, from the strongest evidence to the weakest."""

    INDEPENDENT = "independent"  # no more than what reads the model
    SAME_LIBRARY = "same library"  # kernels or build
    SELF_CHECK = "self-check"  # importer and compiler: it proves nothing by agreeing

    @property
    def rank(self) -> int:
        """Position in order of evidence: 0 is the strongest."""
        return list(Relation).index(self)

    def named(self, source: str) -> str:
        """Return a reference's name with its relation, where that is worth a word: ``onnxruntime (same library)``."""
        return source if self is Relation.INDEPENDENT else f"{source} ({self.value})"


@dataclass(frozen=True)
class Deviation:
    """How far some elements of an output move in an arithmetic."""

    rms: float  # the root mean square, of the run in which it is largest
    largest: float


@dataclass(frozen=True)
class Control:
    """How far a declared arithmetic moves an output: the same model computed in it on the host, beside float32."""

    arithmetic: str
    source: str  # who computed it, with version
    whole: Deviation  # of all elements that do not jump
    # axis -> for each index along it, the deviation of its elements; None where they are too few to tell.
    axes: Mapping[int, tuple[Deviation | None, ...]] = field(default_factory=dict)
    # exponent of 16 -> the deviation of the elements whose magnitude has it.
    sizes: Mapping[int, Deviation] = field(default_factory=dict)
    # flat index of an element that jumps -> its value in each run. An element jumps where an operator such
    # as Floor or ArgMax decides otherwise in the arithmetic, or a value overflows.
    jumps: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    jumping: int = 0  # how many elements jump; ``jumps`` holds the first of them
    clipped: tuple[str, ...] = ()  # the model's weights with values that are too large for the arithmetic


@dataclass(frozen=True)
class RunResult:
    """What running a program gave, on a board or through a reference."""

    source: str  # who computed it, with version: ``sim: iree 3.13.0 local-task`` or ``onnxruntime 1.31.1``
    outputs: Mapping[str, Array]  # output name -> tensor, in the program's order
    # (start, end) of every timed iteration on the device's own monotonic clock; one after the other from 0 where it is
    # known how long each took, but not when.
    iterations_ns: tuple[tuple[int, int], ...] = ()
    peak_memory_bytes: int | None = None  # the worker's peak resident memory, or None where it was not measured
    # board, runtime, agent, clocks, temperatures: whatever is needed to know what was measured.
    provenance: Mapping[str, Any] = field(default_factory=dict)
    cold: bool = False  # whether the first of the iterations was the program's first run since it was loaded
    # output name -> a reference's own noise, of the output's shape and NOISE_DTYPE, where it was measured.
    noise: Mapping[str, Array] = field(default_factory=dict)
    relation: Relation = Relation.INDEPENDENT  # of a reference, to the program that it judges
    # the answers of all its iterations; None where they were not compared with each other.
    repetition: Repetition | None = None
    # output name -> how far the board's arithmetic moves it, for outputs of a reference that it was computed for.
    control: Mapping[str, Control] = field(default_factory=dict)

    @property
    def device_ns(self) -> list[int]:
        """How long each timed iteration took, in nanoseconds of the device's clock."""
        return [end - start for start, end in self.iterations_ns]


@dataclass(frozen=True)
class Tolerance:
    """``|a-b| <= atol + rtol*|b|``, where b is the reference."""

    rtol: float
    atol: float


@dataclass(frozen=True)
class Model:
    """A model as it was read: what stage *import* makes."""

    name: str
    format: str  # ``onnx``, ``mlir`` or ``vmfb`` (already compiled)
    path: Path
    # every file that belongs to it, name in the program's folder -> path (the model and its external data).
    files: Mapping[str, Path]
    digest: str  # of all those files together, ``blake3:...``
    function: str = ""
    # inputs, outputs: specs in order; None where only the board can tell (``vmfb``).
    inputs: tuple[TensorSpec, ...] | None = None
    outputs: tuple[TensorSpec, ...] | None = None
    # input name -> (low, high) where the model itself bounds its input's values.
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)  # the values the user gave to symbolic dimensions
    has_float64: bool = True  # whether it computes with float64; True where the importer cannot tell
    # what wrote the model, opset versions and the like; for the record. ``unseen_state`` names what it keeps from run
    # to run and does not return; ``random`` has the ``nodes`` that draw random numbers, and the ``outputs`` that depend
    # on them.
    producer: Mapping[str, Any] = field(default_factory=dict)
    cached: bool = False

    @property
    def unseen(self) -> str:
        """What a comparison of its outputs says nothing about, for people; "" where it keeps no state."""
        state = ", ".join(self.producer.get("unseen_state", ()))
        return state and f"it keeps state from run to run ({state}): what no output shows of that was not compared"

    @property
    def random(self) -> tuple[str, ...]:
        """The nodes that draw random numbers which outputs depend on; a seed does not make backends agree."""
        return tuple(self.producer.get("random", {}).get("nodes", ()))

    @property
    def random_outputs(self) -> tuple[str, ...]:
        """The outputs that depend on those random numbers."""
        return tuple(self.producer.get("random", {}).get("outputs", ()))


@dataclass(frozen=True)
class Artifact:
    """A program that a runtime can load and how it was made: what stage *compile* makes."""

    runtime: str  # the runtime it is for: ``iree`` or ``onnxruntime``
    main: str
    files: Mapping[str, Path]
    digests: Mapping[str, str]
    function: str
    compiler: str  # name and version, ``none`` where nothing was compiled
    flags: tuple[str, ...] = ()  # the compiler's flags, target included
    # inputs, outputs: specs where known; the loaded program's own are the truth.
    inputs: tuple[TensorSpec, ...] | None = None
    outputs: tuple[TensorSpec, ...] | None = None
    # entry point -> its inputs and outputs, where more than ``function`` is known.
    methods: Mapping[str, tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]] = field(default_factory=dict)
    cached: bool = False
    seconds: float = 0.0  # how long compiling took (0 when cached)
    log: Path | None = None
    # what the compiler tells of its work, anything that JSON can say; ``text``, a line for people.
    notes: Mapping[str, Any] = field(default_factory=dict)
    # the last of ``inputs``, where the program takes more than its model does: what they are given, in order.
    carried: Mapping[str, Array] = field(default_factory=dict, compare=False)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of its outputs, as far as they are known: programs may have lost those of their models."""
        return tuple(spec.name for spec in self.outputs or ())


MOST_NAMES = 200
# ExecuTorch's own kernels, and its backends as `--backend=` and as programs call them. Of several that the flag names,
# the later ones may take what the first leaves.
PORTABLE = "portable"
BACKEND_FLAG = "--backend="
BACKENDS = {"xnnpack": "XnnpackBackend", PORTABLE: PORTABLE}
# Beside a backend that is not of those: what programs call it. The compiler adds it to the flags that it had.
DELEGATE_FLAG = "--delegate="
_SHOWN = 8


@dataclass(frozen=True)
class Part:
    """The nodes of a program that one device, provider or delegate ran."""

    device: str  # as the runtime names it: ``CPUExecutionProvider``, ``local-task``, ``XnnpackBackend``
    nodes: int = 0  # how many; 0 where the runtime does not tell nodes apart, and this is the whole program
    names: tuple[str, ...] = ()  # which, where the runtime names them; at most :data:`MOST_NAMES`
    elsewhere: bool = False  # whether this is another place than the program was told to run in

    @classmethod
    def of(cls, device: str, names: Sequence[str], *, elsewhere: bool = False) -> Part:
        """The part that has all of these nodes; it keeps as many names as it may."""
        return cls(device, len(names), tuple(names[:MOST_NAMES]), elsewhere)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Part:
        """The part that :meth:`to_json` made a dictionary of."""
        return cls(values["device"], values["nodes"], tuple(values["names"]), values["elsewhere"])

    def to_json(self) -> dict[str, Any]:
        """What JSON can say of it."""
        return {"device": self.device, "nodes": self.nodes, "names": list(self.names), "elsewhere": self.elsewhere}


Placement = tuple[Part, ...]


@dataclass(frozen=True)
class RequestedDevice:
    """The device that a program was told to run on."""

    device: str
    binding: bool  # whether somebody asked for it: a program of which nothing ran there has failed
    # whether it is a backend that the program was compiled for, of which the runtime does not know.
    is_backend: bool = False

    @classmethod
    def of(cls, runtime: str, flags: Sequence[str], device: str) -> RequestedDevice:
        """What the board's config and the compiler's flags say together.

        Args:
            flags: of the compiler that made it.
            device: as the board's config names it; "" where that names none.
        """
        if runtime != "executorch":
            return cls(device, bool(device))
        # It has one device, the CPU: what is asked for is a backend.
        named = [flag.removeprefix(BACKEND_FLAG) for flag in flags if flag.startswith(BACKEND_FLAG)]
        first, _, rest = named[-1].partition(",") if named else ("", "", "")
        called = next((one.removeprefix(DELEGATE_FLAG) for one in flags if one.startswith(DELEGATE_FLAG)), first)
        return cls(BACKENDS.get(first, called), bool(first) and not rest, is_backend=bool(first))

    def mark(self, placement: Placement) -> Placement:
        """The placement with what ran elsewhere marked, where the runtime could not know."""
        if not self.is_backend or any(part.device == self.device for part in placement):
            return placement
        return tuple(replace(part, elsewhere=True) for part in placement)

    def check(self, placement: Placement | None, *, no_fallback: bool) -> str:
        """Whether a program ran where it was told to; returns a note on what did not, or "".

        Args:
            placement: where it ran, marked; None where the runtime does not tell.

        Raises:
            RanElsewhere: none of it ran there, or with ``no_fallback`` not all of it.
        """
        if placement is None:
            if no_fallback:
                raise RanElsewhere(
                    "the runtime does not tell where the program ran",
                    hint="leave --no-fallback out, or use a runtime that tells (docs/extending.md)",
                )
            return ""
        wrong = [part for part in placement if part.elsewhere]
        if not wrong or not (self.binding or no_fallback):
            return ""
        text = f"{_share(placement, wrong)} ran on {_devices(wrong)}, not on {self.device or 'the default device'}"
        if len(wrong) < len(placement):
            names = [name for part in wrong for name in part.names][:_SHOWN]
            left = sum(part.nodes for part in wrong) - len(names)
            text += f": {', '.join(names)}{f' and {left} more' if left else ''}"
        elif self.binding:
            raise RanElsewhere(text, hint="nothing of it can run there: ask for another device, or for none")
        if no_fallback:
            raise RanElsewhere(text, hint="leave --no-fallback out to allow this")
        return text


def placement_text(placement: Sequence[Mapping[str, Any]]) -> str:
    """``XnnpackBackend (1 node), portable (4 nodes)``, of a record."""
    return ", ".join(
        f"{part['device']} ({_counted(part['nodes'])})" if part["nodes"] else part["device"] for part in placement
    )


def _share(placement: Placement, wrong: Sequence[Part]) -> str:
    total, count = sum(part.nodes for part in placement), sum(part.nodes for part in wrong)
    if not count:
        return "the program"
    return f"all {_counted(total)}" if count == total > 1 else f"{count} of {_counted(total)}"


def _devices(parts: Sequence[Part]) -> str:
    return " and ".join(dict.fromkeys(part.device for part in parts))


def _counted(nodes: int) -> str:
    return f"{nodes} node{'s' * (nodes != 1)}"
