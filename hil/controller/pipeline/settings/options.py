"""Define the options for running a model, for the library, the command line and records.

A field of :class:`CaseSettings`, :class:`RunSettings` or :class:`Options` with a :class:`Spec` is an option of
``hil.run``. If the spec has a help text, it is also an option of all commands that run models, including farm commands.
Suites and pytest have the options of :class:`CaseSettings`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hil.controller.models.sizing.sizes import Range, format_range
from hil.controller.models.sizing.sizes import parse_range as parse_range_of_sizes
from hil.core.arithmetic import ARITHMETICS, check_arithmetic
from hil.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from hil.core.tensors import Array

T = TypeVar("T", bound="CaseSettings")

DEFAULT_TIMEOUT_SECONDS = 60.0
COMPILE_TIMEOUT_SECONDS = 1800.0
# Default counts of a profiled run, because a single cold run is not representative.
PROFILED_COUNTS = {"iterations": 10, "warmup": 2}
# Maximum timeout: longer than any useful wait, and within the range of clocks and gRPC.
_MAX_SECONDS = 1e7
# Kind of an argument: a description, and a function that converts the value or raises ValueError.
Kind = tuple[str, Callable[[Any], Any]]


def check_value(name: str, value: Any, kind: Kind, hint: str = "") -> Any:
    """Convert the value of option ``name`` to a ``kind``. Raises UsageError if the value is invalid."""
    wanted, make = kind
    try:
        return make(value)
    except (ValueError, TypeError, OverflowError):
        shown = repr(value) if isinstance(value, (str, bytes, Real, type(None))) else _describe_type(value)
        raise UsageError(f"{name} must be {wanted}, got {shown[:80]}", hint=hint) from None


def _describe_type(value: Any) -> str:
    if isinstance(value, (list, tuple, set, frozenset)) and value:
        kinds = dict.fromkeys(type(item).__name__ for item in value)
        return f"a {type(value).__name__} of {' and '.join(kinds)}"
    return f"a {type(value).__name__}"


def _require_type(*kinds: type) -> Callable[[Any], Any]:
    def make(value: Any) -> Any:
        # bool is a subclass of int, but is not a valid number here.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError
        return value

    return make


def _to_int(value: Any) -> int:
    return int(_require_type(Integral)(value))


def _to_float(value: Any) -> float:
    return float(_require_type(Real)(value))


def _to_seconds(value: Any) -> float:
    seconds = _to_float(value)
    if not 0 <= seconds <= _MAX_SECONDS:
        raise ValueError
    return seconds


def _allow_none(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else make(value)


def _to_texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise ValueError
    return tuple(value)


def _to_path(value: Any) -> Path:
    return Path(_require_type(str, os.PathLike)(value))


def _to_tensors(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return _to_texts(value)
    if not all(isinstance(name, str) for name in value):
        raise ValueError
    return dict(value)


def _to_sizes(value: Any) -> dict[str, int | str]:
    sizes = {
        _require_type(str)(name): size if isinstance(size, str) else _to_int(size)
        for name, size in _require_type(Mapping)(value).items()
    }
    split_dims(sizes)
    return sizes


def _to_arithmetic(value: Any) -> str:
    if _require_type(str)(value) not in ("", *ARITHMETICS):
        raise ValueError
    return str(value)


def _to_range(value: Any) -> tuple[float, float]:
    low, high = map(_to_float, _require_type(Sequence)(value))
    if not float("-inf") < low <= high < float("inf"):
        raise ValueError
    return low, high


def make_count_kind(least: int, most: int) -> Kind:
    """Return the kind of a whole number in a range."""

    def make(value: Any) -> int:
        if not least <= (count := _to_int(value)) <= most:
            raise ValueError
        return count

    return f"a whole number from {least} to {most:,}", make


TEXT: Kind = ("a string", _require_type(str))
SECONDS: Kind = (f"a number of seconds from 0 to {_MAX_SECONDS:g}", _to_seconds)
PATH: Kind = ("a path", _to_path)
TEXTS: Kind = ("a sequence of strings", _to_texts)
_COUNT: Kind = ("a whole number", _to_int)
# Maximum number of runs in one call, because the agent returns two time stamps for each run.
MAX_RUNS = 1_000_000
_NUMBER_OR_NONE: Kind = ("a number or None", _allow_none(_to_float))
PATH_OR_NONE: Kind = ("a path or None", _allow_none(_to_path))
_FLAG: Kind = ("True or False", _require_type(bool))
_TENSORS: Kind = ("arrays by name, or a sequence of strings as on the command line", _to_tensors)


def parse_dims(texts: Sequence[str], option: str = "--dim") -> dict[str, int | str]:
    """Parse ``N=4`` to {"N": 4}, and ``N=1..8`` to {"N": "1..8"}.

    Raises:
        UsageError: the text is not ``NAME=N`` with N of at least 0, or ``NAME=A..B``; or a name has two sizes.
    """
    dims: dict[str, int | str] = {}
    for text in texts:
        # Split at the last equals sign: a name may contain one, a size cannot.
        name, _, value = text.rpartition("=")
        try:
            size = int(value) if value.isdecimal() else format_range(parse_range_of_sizes(value))
            why = ""
        except ValueError as error:
            size, why = "", f": {error}" if str(error) else ""
        if not name or size == "":
            hint = f"for example {option} N=1, or {option} N=1..512 for one case per edge of the range"
            raise UsageError(f"{option} {text!r}: expected NAME=SIZE or NAME=LOW..HIGH{why}", hint=hint)
        if dims.setdefault(name, size) != size:
            raise UsageError(f"{option} has conflicting sizes for {name}: {dims[name]} and {size}", hint="use only one")
    return dims


def split_dims(dims: Mapping[str, int | str]) -> tuple[dict[str, int], dict[str, Range]]:
    """Split dimensions into sizes and ranges (``1..512`` -> (1, 512)). Raises ValueError for an invalid range."""
    sizes = {name: size for name, size in dims.items() if not isinstance(size, str)}
    return sizes, {name: parse_range_of_sizes(size) for name, size in dims.items() if isinstance(size, str)}


def parse_range(text: str, option: str = "--input-range") -> tuple[float, float] | None:
    """Parse ``-1:1`` to (-1.0, 1.0), and "" to None.

    Raises:
        UsageError: the text is not two finite numbers in ascending order.
    """
    if not text:
        return None
    try:
        return _to_range([float(part) for part in text.split(":")])
    except ValueError:
        wanted = "expected LOW:HIGH, two finite numbers with LOW not above HIGH"
        raise UsageError(f"{option} {text!r}: {wanted}", hint="for example --input-range -1:1") from None


def parse_accept_option(texts: Sequence[str], option: str = "--accept") -> tuple[str, ...]:
    """Validate texts of ``--accept`` and make the paths of Python files absolute. Raises UsageError."""
    if not texts:
        return ()
    from hil.compare.criteria import resolve_files
    from hil.controller.pipeline.verdicts.accepting import load_rules

    resolved = tuple(resolve_files(text, Path.cwd()) for text in texts)
    load_rules(resolved, option)
    return resolved


def parse_tensors_option(texts: Sequence[str], option: str = "--input") -> tuple[str, ...]:
    """Call the Python functions of ``--input`` or ``--expected``. Raises UsageError if a function fails."""
    if not any(".py:" in text for text in texts):
        return tuple(texts)
    from hil.controller.pipeline.settings.given_inputs import call_functions
    from hil.controller.pipeline.verdicts.accepting import load_function

    return call_functions(texts, load_function, option)


def parse_seconds(value: float, option: str = "--timeout") -> float:
    """Validate a timeout in seconds. Raises UsageError if the timeout is negative, too large or not a number."""
    return float(check_value(option, value, SECONDS))


def parse_arithmetic(text: str, option: str = "--arithmetic") -> str:
    """Return the name of an arithmetic; "" is none. Raises UsageError if the name is unknown."""
    return check_arithmetic(text, option)


@dataclass(frozen=True)
class Spec:
    """Definition of an option for all interfaces."""

    kind: Kind  # description of the library's argument, and the conversion to the field's value
    hint: str = ""  # hint for an invalid argument
    help: str = ""  # help text; "" excludes the option from the command line
    flag: str = ""  # long option name; "" is the field's name with dashes
    metavar: str | None = None  # placeholder for the value in the help
    repeats: bool = False  # True if the option may be repeated
    # converts the command line's value (a text, a number, or a tuple for a repeated option) to the field's value. The
    # second argument is the option's name.
    of_text: Callable[[Any, str], Any] | None = None
    # True if the option can change a case's result; the command that repeats the case then includes the option.
    decides: bool = True
    shows_default: bool = False  # True if the help text shows the default
    bounds: tuple[int, int] | None = None  # smallest and largest value of a count


def _make_option(default: Any, kind: Kind, help: str = "", **more: Any) -> Any:
    metadata = {"spec": Spec(kind, help=help, **more)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _make_count(default: int, help: str, *, least: int = 1, most: int = MAX_RUNS) -> Any:
    kind = make_count_kind(least, most)

    def parse_text(value: Any, option: str) -> Any:
        return check_value(option, value, kind)

    return _make_option(default, kind, help, of_text=parse_text, bounds=(least, most), shows_default=True)


@dataclass(frozen=True)
class CaseSettings:
    """Settings of a case in runs, suites and pytest."""

    # settings of the project file: model file pattern -> field -> value; see :mod:`.model_settings`.
    per_model: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, kw_only=True)

    # added after the flags of the board and the flow.
    compile_flags: tuple[str, ...] = _make_option(
        (),
        TEXTS,
        "Compiler flag, added to the flags of the board and the flow. Repeatable.",
        flag="--compile-flag",
        metavar="FLAG",
        repeats=True,
        hint="for example ['--iree-opt-level=O2']",
    )
    seed: int = _make_option(0, _COUNT, "Seed of random inputs.", shows_default=True)
    input_range: tuple[float, float] | None = _make_option(
        None,
        ("two numbers in ascending order", _allow_none(_to_range)),
        "Range of random input values.",
        metavar="LOW:HIGH",
        of_text=parse_range,
    )
    # reference names; empty uses the flow's references, or the default for the model's format.
    references: tuple[str, ...] = _make_option(
        (),
        TEXTS,
        "Reference to compare with: onnxruntime, iree-llvm-cpu, onnx-reference, ... (default: from the flow or the "
        "model's format). Repeatable.",
        flag="--reference",
        metavar="NAME",
        repeats=True,
        hint="for example ['onnxruntime']",
    )
    # rtol, atol: None uses the dtype's default; in a suite, the case's or the flow's value takes precedence.
    rtol: float | None = _make_option(
        None, _NUMBER_OR_NONE, "Relative tolerance (default: from the flow or case, or by dtype)."
    )
    atol: float | None = _make_option(
        None,
        _NUMBER_OR_NONE,
        "Absolute tolerance (default: from the flow or case, or by dtype and the reference's scale).",
    )
    # the board's arithmetic; "" uses the arithmetic that the flow or the board's config declares.
    arithmetic: str = _make_option(
        "",
        (f"one of {', '.join(ARITHMETICS)}", _to_arithmetic),
        "The board's arithmetic: float32, float16, bfloat16, int8 (default: from the flow or the board's config).",
        metavar="NAME",
        of_text=parse_arithmetic,
    )
    # name patterns of outputs that may pass although they cannot be judged.
    allow_blind: tuple[str, ...] = _make_option(
        (),
        TEXTS,
        "Pass this output even if no tolerance can detect wrong values (BLIND); * is a wildcard. Repeatable.",
        metavar="OUTPUT",
        repeats=True,
    )
    # criteria that replace the tolerance for outputs: texts of :mod:`hil.compare.criteria`.
    accept: tuple[str, ...] = _make_option(
        (),
        TEXTS,
        "Criteria for outputs instead of a tolerance, such as 'logits: top1>=0.99, kl<=1e-4'. Repeatable.",
        metavar="[OUTPUT:]CRITERIA",
        repeats=True,
        hint="for example ['logits: top1>=0.99, kl<=1e-4']",
        of_text=parse_accept_option,
    )
    # for a pass, require an independent reference: it shares neither compiler nor kernels nor build with the program.
    require_independent: bool = _make_option(
        False, _FLAG, "Require an independent reference for a pass (else REFERENCE_ERROR)."
    )
    # name patterns of outputs that may be 0 if the reference has subnormal numbers.
    allow_flush: tuple[str, ...] = _make_option(
        (),
        TEXTS,
        "Accept 0 where the reference of this output is subnormal; * is a wildcard. Repeatable.",
        metavar="OUTPUT",
        repeats=True,
    )
    # iterations, warmup: number of timed and untimed runs.
    iterations: int = _make_count(1, "Number of timed runs.")
    warmup: int = _make_count(0, "Number of untimed runs before the timed runs.", least=0)
    # number of repetitions of all these runs.
    repeat: int = _make_count(1, "Repeat all these runs N times, and compare the outputs.", most=100_000)
    # load the program before each repetition.
    fresh_load: bool = _make_option(False, _FLAG, "With --repeat: reload the program for each repetition.")
    # number of compilations without the cache.
    recompile: int = _make_count(1, "Compile N times without the cache, and compare programs and outputs.", most=10_000)
    # name patterns of outputs with allowed differences between iterations.
    allow_unstable: tuple[str, ...] = _make_option(
        (),
        TEXTS,
        "Pass this output despite differences between iterations within the tolerance; * is a wildcard. Repeatable.",
        metavar="OUTPUT",
        repeats=True,
    )
    # seconds for loading, for all runs together, and per reference.
    timeout: float = _make_option(
        DEFAULT_TIMEOUT_SECONDS,
        SECONDS,
        "Timeout for loading, for all runs together, and for each reference.",
        metavar="S",
        of_text=parse_seconds,
        shows_default=True,
    )
    # directory for the compiler's IR; a suite creates a subdirectory per case.
    debug_ir: Path | None = _make_option(
        None,
        PATH_OR_NONE,
        "Dump the compiler's IR to this directory; suites add a subdirectory per case.",
        metavar="DIR",
        decides=False,
    )
    # also write the IR after each compiler pass.
    debug_ir_passes: bool = _make_option(
        False, _FLAG, "With --debug-ir: also dump the IR after each pass, one file per pass.", decides=False
    )
    # ignore cached programs and reference results.
    recompute: bool = _make_option(
        False, _FLAG, "Ignore cached programs and reference results.", flag="--recompute-cache", decides=False
    )
    # fail if a node ran on a device other than requested, instead of adding a note.
    no_fallback: bool = _make_option(False, _FLAG, "Fail (FALLBACK) if a node runs on a device other than requested.")
    # measure the energy of an inference, with the meter of the board's config.
    energy: bool = _make_option(False, _FLAG, "Measure the energy with the board's meter.", decides=False)
    # labels of the stored record: see :mod:`hil.controller.storage.sources.origin`.
    labels: tuple[str, ...] = _make_option(
        (),
        TEXTS,
        "Label of the stored result, for searching; labels from HIL_LABELS (A,B) are added. Repeatable.",
        flag="--label",
        metavar="TEXT",
        repeats=True,
        hint="for example ['nightly']",
        decides=False,
    )


@dataclass(frozen=True)
class RunSettings(CaseSettings):
    """Settings for running a model: the options of ``hil run`` except the board."""

    # ``iree``, ``onnxruntime``, ...; "" is the board's default.
    runtime: str = _make_option("", TEXT, "Runtime: iree, onnxruntime, ... (default: the board's).", metavar="NAME")
    device: str = _make_option(
        "", TEXT, "Device of the runtime: vulkan, ... (default: the board's; hil board devices).", metavar="NAME"
    )
    function: str = _make_option("", TEXT, "Entry point, if the model has several.", metavar="NAME")
    # ranges are moved to ``dim_ranges``.
    dims: Mapping[str, int] = _make_option(
        {},
        ("sizes by name, such as {'N': 4}", _to_sizes),
        "Size of a symbolic dimension; LOW..HIGH runs one case per edge of the range. Repeatable.",
        flag="--dim",
        metavar="NAME=SIZE",
        repeats=True,
        of_text=parse_dims,
    )
    # dimension -> first and last size to test.
    dim_ranges: Mapping[str, Range] = dataclasses.field(default_factory=dict)
    # texts of ``--input``, or name -> tensor.
    inputs: Sequence[str] | Mapping[str, Array] = _make_option(
        (),
        _TENSORS,
        "Input: x.npy, x.npz, x.pb, 4x8xf32=@x.bin or load.py:FUNCTION (default: MODEL.inputs.npz, or random).",
        flag="--input",
        metavar="[NAME=]FILE",
        repeats=True,
        of_text=parse_tensors_option,
        hint="for example {'x': array}, or ['x=x.npy']",
    )
    # texts of ``--expected``, or name -> tensor. hil compares with these first. hil uses references in addition only if
    # the user names them.
    expected: Sequence[str] | Mapping[str, Array] = _make_option(
        (),
        _TENSORS,
        "Expected outputs instead of a reference.",
        metavar="[NAME=]FILE",
        repeats=True,
        of_text=parse_tensors_option,
        hint="for example {'y': array}, or ['y=y.npy']",
    )
    # count the instructions of all iterations: see :mod:`hil.agent.instructions`.
    instructions: bool = _make_option(
        False, _FLAG, "Count the instructions of each iteration, if the board can.", decides=False
    )
    # specification of prompts for a decoder; None runs the model once.
    generate: Path | None = _make_option(
        None,
        PATH_OR_NONE,
        "Generate tokens with a decoder and verify each: a TOML file with prompts.",
        metavar="SPEC",
    )
    # name of a prompt in the specification; "" is the only prompt. Commands run a case for each prompt.
    prompt: str = _make_option("", TEXT)
    # for expected outputs, the IREE element type (``si64``) that iree-run-module requires; "" accepts any.
    element_types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sizes, ranges = split_dims(self.dims)
        object.__setattr__(self, "dims", sizes)
        object.__setattr__(self, "dim_ranges", {**self.dim_ranges, **ranges})


@dataclass(frozen=True)
class Options(RunSettings):
    """Settings of a case that the stages use."""

    compiler: str = _make_option("", TEXT)  # the compiler; "" is the runtime's default
    # the model before quantization or a similar change; None if not available. hil also compares the outputs with the
    # reference of this model, and reports this comparison separately.
    plain_model: Path | None = _make_option(None, PATH_OR_NONE)
    # name -> tensor, used in place of the plain model's reference.
    plain_expected: Mapping[str, Array] = _make_option(
        {}, ("arrays by name", lambda value: dict(_require_type(Mapping)(value)))
    )
    # minimum SQNR of every output relative to the plain model; None disables the check.
    min_sqnr_db: float | None = _make_option(None, _NUMBER_OR_NONE)
    # if rtol and atol cannot judge an output, use the dtype's default.
    replace_blind_tolerance: bool = False
    profile: bool = False  # run a second time under the runtime's profiler, and record the board's counters


def list_specs(settings: type[CaseSettings]) -> dict[str, Spec]:
    """Return field name -> spec. Fields that are not options are omitted."""
    fields = dataclasses.fields(settings)
    return {field.name: field.metadata["spec"] for field in fields if "spec" in field.metadata}


def check_counts(settings: CaseSettings) -> None:
    """Check that the numbers in the settings are in their ranges. Raises UsageError otherwise.

    The command line checks its options itself. Settings from the library need this check.
    """
    for name, spec in list_specs(type(settings)).items():
        if spec.bounds is not None:
            check_value(flag_of(name, spec), getattr(settings, name), spec.kind)


def flag_of(name: str, spec: Spec) -> str:
    """Return the long name of an option on the command line."""
    return spec.flag or f"--{name.replace('_', '-')}"


def make_options(given: Mapping[str, Any]) -> Options:
    """Return the options for arguments of :func:`hil.run`. Raises UsageError if an option is unknown or invalid."""
    return _build_settings(Options, given, "unknown hil.run option", "known options:")


def make_case_settings(given: Mapping[str, Any]) -> CaseSettings:
    """Return the case settings for library arguments. Raises UsageError if an option is unknown or invalid."""
    return _build_settings(CaseSettings, given, "unknown option", "known options:")


def _build_settings(kind: type[T], given: Mapping[str, Any], unknown: str, known: str) -> T:
    """Build settings from values by name.

    Args:
        unknown: Start of the error message for an unknown option.
        known: Start of the hint that lists the known options.
    """
    specs = list_specs(kind)
    for name in given:
        if name not in specs:
            raise UsageError(f"{unknown} {name!r}", hint=f"{did_you_mean(name, specs)}{known} {', '.join(specs)}")
    return kind(**{name: check_value(name, value, specs[name].kind, specs[name].hint) for name, value in given.items()})


def restore_settings(values: Mapping[str, Any], kind: type[T]) -> dict[str, Any]:
    """Return the fields of a settings class from a stored record: texts become paths, lists become tuples."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    return {name: _restore_value(fields[name].type, value) for name, value in values.items() if name in fields}


def _restore_value(declared: Any, value: Any) -> Any:
    """Convert a JSON value to a field's declared type. The type is a string, because annotations are not evaluated."""
    if isinstance(value, list):
        kind = Path if "tuple[Path" in str(declared) else lambda one: one
        return tuple(kind(one) for one in value)
    if "Path" in str(declared):
        return Path(value) if value else None
    return value


@dataclass(frozen=True)
class _ModelsAndBoard:
    """Models and board of a job (see :func:`hil.controller.devices.choosing.board_resolver.choose`)."""

    models: tuple[Path, ...] = ()
    board: str = ""
    hw_type: str = ""
    identity: Path | None = None
    known_hosts: Path | None = None
    accept_new_host_key: bool = False


@dataclass(frozen=True)
class Job(RunSettings, _ModelsAndBoard):
    """Request of `hil run`.

    Fields are named like options. The job is stored with the run, so that the run can resume.
    """

    wait_s: float = 60.0
    faults: tuple[str, ...] = ()
    flagfile: Path | None = None  # flag file of iree-run-module, instead of models and options
    out: Path | None = None  # directory for runs; None is the default
    # profile, compile_time_profile: directories for profiles of the run and the compilation.
    profile: Path | None = None
    compile_time_profile: Path | None = None

    def make_options(self) -> Options:
        """Return the options that the stages use."""
        shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(RunSettings)}
        return Options(**shared, profile=self.profile is not None)

    @classmethod
    def from_record(cls, request: Mapping[str, Any]) -> Job:
        """Return the job of a stored run."""
        return cls(**{**request, **restore_settings(request, cls)})
