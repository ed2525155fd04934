"""How a model is to be run: every option once, with what it is in the library, on the command line and in records.

A field of :class:`CaseSettings`, :class:`RunSettings` or :class:`Options` that has a :class:`Spec` is an option of
``hil.run``. Where the spec has a help, the verbs that run models have it too, the farm among them; those of
:class:`CaseSettings` suites and pytest have as well.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hil.controller.models.sizes import Range, range_text
from hil.controller.models.sizes import parse_range as parse_range_of_sizes
from hil.core.arithmetic import ARITHMETICS, check_arithmetic
from hil.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from hil.core.tensors import Array

T = TypeVar("T", bound="CaseSettings")

DEFAULT_TIMEOUT_S = 60.0
COMPILE_TIMEOUT_S = 1800.0
# Of a run under the profiler where nobody says how many: one cold run tells little of where the time goes.
PROFILED_COUNTS = {"iterations": 10, "warmup": 2}
# More than anybody waits, and less than what clocks and gRPC can count.
_MOST_SECONDS = 1e7
# What an argument must be: in words, and the value as hil has it, or a ValueError where it is something else.
Kind = tuple[str, Callable[[Any], Any]]


def checked(name: str, value: Any, kind: Kind, hint: str = "") -> Any:
    """A value as hil has it; UsageError where it is something else."""
    wanted, make = kind
    try:
        return make(value)
    except (ValueError, TypeError, OverflowError):
        shown = repr(value) if isinstance(value, (str, bytes, Real, type(None))) else _described(value)
        raise UsageError(f"{name} must be {wanted}, got {shown[:80]}", hint=hint) from None


def _described(value: Any) -> str:
    if isinstance(value, (list, tuple, set, frozenset)) and value:
        kinds = dict.fromkeys(type(item).__name__ for item in value)
        return f"a {type(value).__name__} of {' and '.join(kinds)}"
    return f"a {type(value).__name__}"


def _an(*kinds: type) -> Callable[[Any], Any]:
    def make(value: Any) -> Any:
        # A bool counts as a number in Python, and as a mistake here.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError
        return value

    return make


def _int(value: Any) -> int:
    return int(_an(Integral)(value))


def _float(value: Any) -> float:
    return float(_an(Real)(value))


def _seconds(value: Any) -> float:
    seconds = _float(value)
    if not 0 <= seconds <= _MOST_SECONDS:
        raise ValueError
    return seconds


def _or_none(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else make(value)


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise ValueError
    return tuple(value)


def _path(value: Any) -> Path:
    return Path(_an(str, os.PathLike)(value))


def _tensors(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return _texts(value)
    if not all(isinstance(name, str) for name in value):
        raise ValueError
    return dict(value)


def _sizes(value: Any) -> dict[str, int | str]:
    sizes = {
        _an(str)(name): size if isinstance(size, str) else _int(size) for name, size in _an(Mapping)(value).items()
    }
    split_dims(sizes)
    return sizes


def _arithmetic(value: Any) -> str:
    if _an(str)(value) not in ("", *ARITHMETICS):
        raise ValueError
    return str(value)


def _range(value: Any) -> tuple[float, float]:
    low, high = map(_float, _an(Sequence)(value))
    if not float("-inf") < low <= high < float("inf"):
        raise ValueError
    return low, high


TEXT: Kind = ("a text", _an(str))
SECONDS: Kind = (f"a number of seconds from 0 to {_MOST_SECONDS:g}", _seconds)
PATH: Kind = ("a path", _path)
TEXTS: Kind = ("a sequence of texts", _texts)
_COUNT: Kind = ("a whole number", _int)
_NUMBER_OR_NONE: Kind = ("a number or None", _or_none(_float))
_PATH_OR_NONE: Kind = ("a path or None", _or_none(_path))
_FLAG: Kind = ("True or False", _an(bool))
_TENSORS: Kind = ("arrays by name, or a sequence of texts as the command line takes them", _tensors)


def parse_dims(texts: Sequence[str], option: str = "--dim") -> dict[str, int | str]:
    """``N=4`` -> {"N": 4}, and ``N=1..8`` -> {"N": "1..8"}.

    Raises:
        UsageError: not a name and a number of at least 0, or a range of such numbers; or a name has two sizes.
    """
    dims: dict[str, int | str] = {}
    for text in texts:
        # A name may hold an equals sign, a size does not.
        name, _, value = text.rpartition("=")
        try:
            size = int(value) if value.isdecimal() else range_text(parse_range_of_sizes(value))
            why = ""
        except ValueError as error:
            size, why = "", f": {error}" if str(error) else ""
        if not name or size == "":
            hint = f"for example {option} N=1, or {option} N=1..512 for a case of each edge of the range"
            raise UsageError(f"{option} {text!r} is not NAME=SIZE or NAME=LOW..HIGH{why}", hint=hint)
        if dims.setdefault(name, size) != size:
            raise UsageError(f"{option} gives {name} two sizes: {dims[name]} and {size}", hint="one is enough")
    return dims


def split_dims(dims: Mapping[str, int | str]) -> tuple[dict[str, int], dict[str, Range]]:
    """Sizes, and ranges of sizes (``1..512`` -> (1, 512)), by dimension. Raises ValueError: a text is no range."""
    sizes = {name: size for name, size in dims.items() if not isinstance(size, str)}
    return sizes, {name: parse_range_of_sizes(size) for name, size in dims.items() if isinstance(size, str)}


def parse_range(text: str, option: str = "--input-range") -> tuple[float, float] | None:
    """``-1:1`` -> (-1.0, 1.0); "" -> None. Raises UsageError: not two finite numbers, the lower one first."""
    if not text:
        return None
    try:
        return _range([float(part) for part in text.split(":")])
    except ValueError:
        raise UsageError(f"{option} {text!r} is not LOW:HIGH", hint="for example --input-range -1:1") from None


def parse_accept_option(texts: Sequence[str], option: str = "--accept") -> tuple[str, ...]:
    """Check texts of ``--accept``; a Python file that they name becomes an absolute path. Raises UsageError."""
    if not texts:
        return ()
    from hil.compare.criteria import resolve_files
    from hil.controller.pipeline.accepting import load_rules

    resolved = tuple(resolve_files(text, Path.cwd()) for text in texts)
    load_rules(resolved, option)
    return resolved


def parse_seconds(value: float, option: str = "--timeout") -> float:
    """Seconds that somebody may wait; UsageError where it is negative, infinite or no number."""
    return float(checked(option, value, SECONDS))


def parse_arithmetic(text: str, option: str = "--arithmetic") -> str:
    """The name of an arithmetic; "" is none. Raises UsageError: hil knows no such arithmetic."""
    return check_arithmetic(text, option)


@dataclass(frozen=True)
class Spec:
    """What an option is, wherever it is given."""

    kind: Kind  # what the library takes, in words, and how it becomes the field's value
    hint: str = ""  # what to do where the library was given something else
    help: str = ""  # for people; "" is none of the command line's
    flag: str = ""  # its long name there; "" is the field's with dashes
    metavar: str | None = None  # what stands for its value in the help
    repeats: bool = False  # whether several may be given
    # the command line's value (a text, a number, or a tuple where it repeats) -> the field's; given with the option's
    # name.
    of_text: Callable[[Any, str], Any] | None = None
    decides: bool = True  # whether what a case comes to depends on it, so that the command which repeats a case has it
    shows_default: bool = False  # whether the help tells the default


def _option(default: Any, kind: Kind, help: str = "", **more: Any) -> Any:
    metadata = {"spec": Spec(kind, help=help, **more)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class CaseSettings:
    """How any case is to be run, in a run, in a suite, under pytest."""

    # pattern of model files -> field -> value, of the project file; see :mod:`.model_settings`.
    per_model: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, kw_only=True)

    seed: int = _option(0, _COUNT, "Of random inputs.", shows_default=True)
    # oracles' names; empty is the flow's, or the default for the model's format.
    references: tuple[str, ...] = _option(
        (),
        TEXTS,
        "What to compare with: onnxruntime, iree-llvm-cpu, onnx-reference, ... (default: the flow's, or by the "
        "model's format); repeats.",
        flag="--reference",
        metavar="NAME",
        repeats=True,
        hint="for example ['onnxruntime']",
    )
    # rtol, atol: None is the dtype's default; in a suite the case's or the flow's own.
    rtol: float | None = _option(
        None, _NUMBER_OR_NONE, "Relative tolerance (default: the flow's or the case's own, or by dtype)."
    )
    atol: float | None = _option(
        None,
        _NUMBER_OR_NONE,
        "Absolute tolerance (default: the flow's or the case's own, or by dtype and the reference's scale).",
    )
    # what the board computes in; "" is as the flow, or the board's config, declares it.
    arithmetic: str = _option(
        "",
        (f"one of {', '.join(ARITHMETICS)}", _arithmetic),
        "What the board computes in: float32, float16, bfloat16, int8 (default: the flow's, or as the board's config "
        "declares).",
        metavar="NAME",
        of_text=parse_arithmetic,
    )
    # patterns of names of outputs that may pass though nobody can judge them.
    allow_blind: tuple[str, ...] = _option(
        (),
        TEXTS,
        "Pass this output though no tolerance could tell a wrong answer from a right one (BLIND). * as in file names; "
        "repeats.",
        metavar="OUTPUT",
        repeats=True,
    )
    # criteria that judge outputs instead of the tolerance: texts of :mod:`hil.compare.criteria`.
    accept: tuple[str, ...] = _option(
        (),
        TEXTS,
        "Judge outputs by these criteria instead of a tolerance, such as 'logits: top1>=0.99, kl<=1e-4'. Repeats.",
        metavar="[OUTPUT:]CRITERIA",
        repeats=True,
        hint="for example ['logits: top1>=0.99, kl<=1e-4']",
        of_text=parse_accept_option,
    )
    # whether a pass needs a reference that shares neither compiler nor kernels nor build with the program.
    require_independent: bool = _option(
        False, _FLAG, "Pass only where an independent reference agrees (else REFERENCE_ERROR)."
    )
    # patterns of names of outputs that may have 0 where the reference has subnormal numbers.
    allow_flush: tuple[str, ...] = _option(
        (),
        TEXTS,
        "Accept 0 where the reference of this output has subnormal numbers. * as in file names; repeats.",
        metavar="OUTPUT",
        repeats=True,
    )
    # iterations, warmup: timed and untimed runs.
    iterations: int = _option(1, _COUNT, "Timed runs.", shows_default=True)
    warmup: int = _option(0, _COUNT, "Untimed runs before.", shows_default=True)
    # how often all of them are run.
    repeat: int = _option(1, _COUNT, "Run all of that so many times and compare the answers.", shows_default=True)
    # load the program again before each repetition.
    fresh_load: bool = _option(False, _FLAG, "With --repeat: load the program again each time.")
    # programs are made so often, without the cache.
    recompile: int = _option(
        1, _COUNT, "Compile so many times without the cache; compare the programs and answers.", shows_default=True
    )
    # patterns of names of outputs that may differ between iterations.
    allow_unstable: tuple[str, ...] = _option(
        (),
        TEXTS,
        "Pass this output though its values differ between iterations, if all are within tolerance. * as in file "
        "names; repeats.",
        metavar="OUTPUT",
        repeats=True,
    )
    # seconds for loading, for the runs together, and for each reference.
    timeout: float = _option(
        DEFAULT_TIMEOUT_S,
        SECONDS,
        "Limit of loading, of the runs together, and of each reference.",
        metavar="S",
        of_text=parse_seconds,
        shows_default=True,
    )
    # folder for the compiler's IR, in a suite one below it for each case.
    debug_ir: Path | None = _option(
        None, _PATH_OR_NONE, "Dump the compiler's IR here, in a suite a folder a case.", metavar="DIR", decides=False
    )
    # whether the IR after each of the compiler's passes goes there too.
    debug_ir_passes: bool = _option(
        False, _FLAG, "With --debug-ir: also the IR after every pass, a file a pass.", decides=False
    )
    # do not take programs or reference results from the cache.
    recompute: bool = _option(
        False, _FLAG, "Ignore cached programs and reference results.", flag="--recompute-cache", decides=False
    )
    # a node that runs on another device than it was told to is an error, not a note.
    no_fallback: bool = _option(
        False, _FLAG, "Fail (FALLBACK) where any node runs on another device than it was told to."
    )
    # what tells the record from others: see :mod:`hil.controller.storage.origin`.
    labels: tuple[str, ...] = _option(
        (),
        TEXTS,
        "A label of what is stored, to find it by; those of HIL_LABELS (A,B) are added. Repeats.",
        flag="--label",
        metavar="TEXT",
        repeats=True,
        hint="for example ['nightly']",
        decides=False,
    )


@dataclass(frozen=True)
class RunSettings(CaseSettings):
    """How one model is to be run: what ``hil run`` says beside the board."""

    # ``iree``, ``onnxruntime``, ...; "" is the board's own choice.
    runtime: str = _option("", TEXT, "iree, onnxruntime, ... (default: the board's).", metavar="NAME")
    function: str = _option("", TEXT, "Entry point, where there are several.", metavar="F")
    # those given as ranges go to ``dim_ranges``.
    dims: Mapping[str, int] = _option(
        {},
        ("sizes by name, such as {'N': 4}", _sizes),
        "Size of a symbolic dimension; LOW..HIGH runs a case for each edge of the range. Repeats.",
        flag="--dim",
        metavar="NAME=SIZE",
        repeats=True,
        of_text=parse_dims,
    )
    # dimension -> the first and the last of the sizes to try.
    dim_ranges: Mapping[str, Range] = dataclasses.field(default_factory=dict)
    # texts of ``--input``, or name -> tensor.
    inputs: Sequence[str] | Mapping[str, Array] = _option(
        (),
        _TENSORS,
        "x.npy, x.npz, x.pb or 4x8xf32=@x.bin; else random.",
        flag="--input",
        metavar="[NAME=]FILE",
        repeats=True,
        hint="for example {'x': array}, or ['x=x.npy']",
    )
    input_range: tuple[float, float] | None = _option(
        None,
        ("two numbers, the lower one first", _or_none(_range)),
        "Of the random inputs' values.",
        metavar="LOW:HIGH",
        of_text=parse_range,
    )
    # texts of ``--expected``, or name -> tensor: compared with first; references beside them only where named.
    expected: Sequence[str] | Mapping[str, Array] = _option(
        (),
        _TENSORS,
        "Expected outputs instead of a reference.",
        metavar="[NAME=]FILE",
        repeats=True,
        hint="for example {'y': array}, or ['y=y.npy']",
    )
    # of each of these, IREE's element type (``si64``) that the program is to give, as iree-run-module compares it; ""
    # where any will do.
    element_types: tuple[str, ...] = ()
    # added after the board's.
    compile_flags: tuple[str, ...] = _option(
        (),
        TEXTS,
        "Added to the board's flags.",
        flag="--compile-flag",
        metavar="FLAG",
        repeats=True,
        hint="for example ['--iree-opt-level=O2']",
    )

    def __post_init__(self) -> None:
        sizes, ranges = split_dims(self.dims)
        object.__setattr__(self, "dims", sizes)
        object.__setattr__(self, "dim_ranges", {**self.dim_ranges, **ranges})


@dataclass(frozen=True)
class Options(RunSettings):
    """How a case is to be run: what the stages look at."""

    compiler: str = _option("", TEXT)  # makes the program; "" is the runtime's own
    # the model as it was before it was quantised or the like: the answer is compared with its reference too, and that
    # is told apart. None where there is none.
    plain_model: Path | None = _option(None, _PATH_OR_NONE)
    # name -> tensor that take that reference's place.
    plain_expected: Mapping[str, Array] = _option({}, ("arrays by name", lambda value: dict(_an(Mapping)(value))))
    # what every output must reach beside the plain model; None asks for nothing.
    min_sqnr_db: float | None = _option(None, _NUMBER_OR_NONE)
    # where rtol and atol cannot judge an output, judge within the dtype's default.
    replace_blind_tolerance: bool = False
    profile: bool = False  # run a second time under the runtime's profiler, and watch the board meanwhile


def specs_of(settings: type[CaseSettings]) -> dict[str, Spec]:
    """Field name -> what that option is; fields that are no option of anybody's are left out."""
    fields = dataclasses.fields(settings)
    return {field.name: field.metadata["spec"] for field in fields if "spec" in field.metadata}


def flag_of(name: str, spec: Spec) -> str:
    """The long name of an option on the command line."""
    return spec.flag or f"--{name.replace('_', '-')}"


def options_of(given: Mapping[str, Any]) -> Options:
    """The options that :func:`hil.run` was called with; UsageError where there is no such option, or it is wrong."""
    return _settings_of(Options, given, "hil.run has no option", "it takes")


def case_settings(given: Mapping[str, Any]) -> CaseSettings:
    """What the library was told of how to run cases; UsageError where there is no such option, or it is wrong."""
    return _settings_of(CaseSettings, given, "there is no option", "one of")


def _settings_of(kind: type[T], given: Mapping[str, Any], unknown: str, known: str) -> T:
    """Settings of values by name; ``unknown`` says that there is no such option, ``known`` begins those there are."""
    specs = specs_of(kind)
    for name in given:
        if name not in specs:
            raise UsageError(f"{unknown} {name!r}", hint=f"{did_you_mean(name, specs)}{known} {', '.join(specs)}")
    return kind(**{name: checked(name, value, specs[name].kind, specs[name].hint) for name, value in given.items()})


def stored_settings(values: Mapping[str, Any], kind: type[T]) -> dict[str, Any]:
    """The fields of a settings class from a stored record: texts are paths again, lists are tuples."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    return {name: _restored(fields[name].type, value) for name, value in values.items() if name in fields}


def _restored(declared: Any, value: Any) -> Any:
    """A JSON value as a field of this declared type (a text: annotations are not evaluated) has it."""
    if isinstance(value, list):
        kind = Path if "tuple[Path" in str(declared) else lambda one: one
        return tuple(kind(one) for one in value)
    if "Path" in str(declared):
        return Path(value) if value else None
    return value


@dataclass(frozen=True)
class _Where:
    """Which models, on which board (see :func:`hil.controller.devices.board_resolver.choose`)."""

    models: tuple[Path, ...] = ()
    board: str = ""
    hw_type: str = ""
    identity: Path | None = None
    known_hosts: Path | None = None
    accept_new_host_key: bool = False


@dataclass(frozen=True)
class Job(RunSettings, _Where):
    """What `hil run` was asked to do; every field has the option of its name. Stored with the run, so it can resume."""

    wait_s: float = 60.0
    faults: tuple[str, ...] = ()
    flagfile: Path | None = None  # of iree-run-module, in the place of models and options
    out: Path | None = None  # where runs are stored; None is the default
    # profile, compile_time_profile: folders for the profiles of the run and of its compilation.
    profile: Path | None = None
    compile_time_profile: Path | None = None

    def options(self) -> Options:
        """What each model's stages look at."""
        shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(RunSettings)}
        return Options(**shared, profile=self.profile is not None)

    @classmethod
    def of_record(cls, request: Mapping[str, Any]) -> Job:
        """The job of a stored run."""
        return cls(**{**request, **stored_settings(request, cls)})
