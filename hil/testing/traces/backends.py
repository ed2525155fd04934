"""Define the backends, which run a module's methods, and parse their names."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hil.controller.pipeline.settings.options import CaseSettings
from hil.core.runtimes import list_known_runtimes
from hil.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from hil.controller.devices.board_choice import BoardChoice
    from hil.core.results import Relation

# All backends of this machine. Unavailable backends are skipped.
ALL = "all"
DEFAULT_FOLDER = "hil-traces"
# Option name -> help, for pytest and for test files run as scripts.
TEXTS = {
    "target_backends": "Backends to compare with the reference, separated by commas: tf, iree_llvmcpu, iree_vmvx, "
    "iree_cuda, iree_vulkan, tflite, board:NAME, or all (default): every backend of this machine except tf. "
    "Unavailable backends are skipped.",
    "reference_backend": "Reference backend (default: tf; for model files, the default reference of the format).",
    "artifacts_dir": f"Directory for programs and traces (default {DEFAULT_FOLDER}).",
}
# Destination names in pytest's options. The prefix avoids conflicts with a project's own options.
PYTEST_DEST = "hil_traces_{}"


@dataclass(frozen=True)
class TraceOptions:
    """Options for traces."""

    target_backends: str = ""  # names separated by commas; "" is :data:`ALL`
    reference_backend: str = ""  # a name; "" is the module's default
    artifacts_dir: Path = Path(DEFAULT_FOLDER)
    settings: CaseSettings = field(default_factory=CaseSettings)  # settings to compile, run and judge programs

    @classmethod
    def of(
        cls, target_backends: Any, reference_backend: Any, artifacts_dir: Any, settings: CaseSettings | None = None
    ) -> TraceOptions:
        """Create options from parser values, which are strings or None."""
        folder = Path(artifacts_dir or DEFAULT_FOLDER)
        return cls(target_backends or "", reference_backend or "", folder, settings or CaseSettings())


def check_backends(text: str) -> str:
    """Validate a list of backends for argparse. Raises ArgumentTypeError for an unknown backend."""
    from argparse import ArgumentTypeError

    from hil.controller.backends.references import load_references

    try:
        parse_targets(text, tuple(load_references()))
    except UsageError as error:
        raise ArgumentTypeError(f"{error.message} ({error.hint})" if error.hint else error.message) from None
    return text


def count_option(words: Iterable[object], *names: str) -> int:
    """Count the occurrences of an option on a command line."""
    return sum(str(word).partition("=")[0] in names for word in itertools.takewhile(lambda word: word != "--", words))


def refuse_second(name: str, count: int) -> None:
    """Raise UsageError if a single-value option is repeated."""
    if count > 1:
        raise UsageError(f"{name} is specified {count} times, but accepts a single value", hint="specify it once")


TF = "tf"
TFLITE = "tflite"
_BOARD = "board:"
# hil's runtimes for a module's programs on a board. The backend's name includes the runtime if it is not the board's
# default. Runtimes of packages are allowed too.
RUNTIMES = ("iree", TFLITE)
# Name -> IREE driver and compiler flags, on this machine. Without flags, hil uses the simulated board's flags for the
# CPU, and compiles for the reported device otherwise.
_IREE = MappingProxyType(
    {
        "iree_llvmcpu": ("local-task", ()),
        "iree_vmvx": ("local-task", ("--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=vmvx")),
        "iree_cuda": ("cuda", ()),
        "iree_vulkan": ("vulkan", ()),
    }
)
PLAIN = (TF, *_IREE, TFLITE)


@dataclass(frozen=True)
class Backend:
    """Backend of a trace."""

    name: str  # name as requested, such as ``board:rpi5``
    # directory name: the backend's name, with a number if the backend was requested several times. The reference has
    # the suffix ``_ref``.
    id: str
    runtime: str  # ``tf``, ``iree`` or ``tflite``, or the name of a hil reference
    choice: BoardChoice | None = None  # the board; None if the backend is not a board

    @property
    def hw_type(self) -> str:
        """The hardware type; "" if the backend is not a board."""
        return self.choice.config.hw_type if self.choice else ""

    @property
    def board(self) -> str:
        """The board's name; "" if the backend is not a board."""
        return self.choice.name if self.choice else ""

    @property
    def is_real(self) -> bool:
        """True for a board with only one user at a time. False for a simulator that hil starts for this backend."""
        return self.choice is not None and (bool(self.choice.address) or not self.choice.config.is_simulator)


def parse_backend(name: str, references: Sequence[str] = ()) -> Backend:
    """Return a backend by name.

    ``tf`` is TensorFlow in this process. ``iree_llvmcpu``, ``iree_vmvx``, ``iree_cuda``, ``iree_vulkan`` and ``tflite``
    run on this machine on a simulated board. ``board:NAME`` is any board that ``hil --board`` accepts.
    ``board:NAME:tflite`` and ``board:NAME:iree`` select a runtime other than the board's default.

    Args:
        references: Names of hil's references, such as ``onnxruntime``. These names are then also backends. Pass them
            only for modules that consist of model files.

    Raises:
        UsageError: unknown backend or board, or the board does not have the runtime.
    """
    if name == TF or name in references:
        return Backend(name, name, name)
    if name in _IREE:
        return Backend(name, name, "iree", _choose_simulated_board("iree", *_IREE[name]))
    if name == TFLITE:
        return Backend(name, name, TFLITE, _choose_simulated_board(TFLITE))
    if name.startswith(_BOARD) and name != _BOARD:
        return _parse_board(name)
    known = tuple(dict.fromkeys((ALL, *PLAIN, *references)))
    raise UsageError(
        f"unknown backend {name!r}",
        hint=f"{did_you_mean(name, known)}known backends: {', '.join(known)}, board:NAME",
    )


def find_relation(target: Backend, reference: Backend) -> Relation:
    """Return the relation of the reference backend to a target.

    A board counts as the CPU reference with the same runtime.
    """
    from hil.controller.backends.references.independence import find_relation

    name = reference.runtime
    if reference.choice is not None:
        name = {"iree": "iree-llvm-cpu", TFLITE: "tflite-builtin"}.get(name, name)
    return find_relation(target.runtime, "tensorflow" if name == TF else name)


def parse_targets(text: str, references: Sequence[str] = ()) -> tuple[Backend, ...]:
    """Parse a comma-separated list of backends. Repeated backends are numbered from 0.

    ``all`` means all backends of this machine except TensorFlow.

    Raises:
        UsageError: see :func:`parse_backend`, or the list is empty.
    """
    words = [name.strip() for name in text.split(",") if name.strip()]
    names = [name for word in words for name in ((*_IREE, TFLITE) if word == ALL else (word,))]
    if not names:
        raise UsageError("--target_backends is empty", hint="for example --target_backends=iree_llvmcpu")
    found = []
    for place, name in enumerate(names):
        number = f"_{names[:place].count(name)}" if names.count(name) > 1 else ""
        found.append(replace(parse_backend(name, references), id=make_folder_name(name) + number))
    return tuple(found)


def parse_reference(name: str, references: Sequence[str] = ()) -> Backend:
    """Return the reference backend. Raises UsageError: see :func:`parse_backend`."""
    return replace(parse_backend(name, references), id=f"{make_folder_name(name)}_ref")


def make_folder_name(name: str) -> str:
    """Convert a backend's name to a directory name."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)


def _parse_board(name: str) -> Backend:
    from hil.controller.devices.choosing.board_resolver import choose

    where, colon, runtime = name.removeprefix(_BOARD).rpartition(":")
    allowed = (*RUNTIMES, *(one.name for one in list_known_runtimes().values() if one.of_package))
    if not colon or runtime not in allowed:
        where, runtime = name.removeprefix(_BOARD), ""
    choice = choose(where)
    config = choice.config
    runtime = runtime or (config.runtime if config.runtime in allowed else RUNTIMES[0])
    if not config.has_runtime(runtime):
        raise UsageError(
            f"board {choice.name} does not support runtime {runtime!r}",
            hint=f"{did_you_mean(runtime, config.devices)}configured runtimes: "
            f"{', '.join(config.devices) or config.runtime}",
        )
    return Backend(name, name, runtime, choice)


def _choose_simulated_board(runtime: str, device: str = "", flags: tuple[str, ...] = ()) -> BoardChoice:
    """Return the simulated board with a given device of a runtime and, if given, other compiler flags."""
    from hil.controller.devices.board_choice import use_device
    from hil.controller.devices.choosing.board_resolver import choose

    choice = use_device(choose("", "sim"), runtime, device)
    compile_flags = {**choice.config.compile_flags, **({runtime: flags} if flags else {})}
    devices = {**choice.config.devices, runtime: device}
    return replace(choice, config=replace(choice.config, devices=devices, compile_flags=compile_flags))
