"""Backends by name: who runs a module's methods."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hil.controller.pipeline.options import CaseSettings
from hil.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from hil.controller.devices.board_choice import BoardChoice
    from hil.core.results import Relation

# Every backend of this machine; those that cannot run here are skipped.
ALL = "all"
DEFAULT_FOLDER = "hil-traces"
# Name of the option -> what it is for; pytest has them, and test files that are run by themselves.
TEXTS = {
    "target_backends": "Backends that traces are compared on, with commas: tf, iree_llvmcpu, iree_vmvx, iree_cuda, "
    "iree_vulkan, tflite, board:NAME, or all: those of this machine but tf; what is not here is skipped (default all).",
    "reference_backend": "The backend that they are compared with (default: tf, and for model files their reference).",
    "artifacts_dir": f"Where programs and traces are kept (default {DEFAULT_FOLDER}).",
}
# What they are called among pytest's options: a project's own of the same name says nothing about backends.
PYTEST_DEST = "hil_traces_{}"


@dataclass(frozen=True)
class TraceOptions:
    """What was asked for."""

    target_backends: str = ""  # names with commas; "" is :data:`ALL`
    reference_backend: str = ""  # a name; "" is the module's own
    artifacts_dir: Path = Path(DEFAULT_FOLDER)
    settings: CaseSettings = field(default_factory=CaseSettings)  # how programs are compiled, run and judged

    @classmethod
    def of(
        cls, target_backends: Any, reference_backend: Any, artifacts_dir: Any, settings: CaseSettings | None = None
    ) -> TraceOptions:
        """Options as a parser gives them, each a text or None."""
        folder = Path(artifacts_dir or DEFAULT_FOLDER)
        return cls(target_backends or "", reference_backend or "", folder, settings or CaseSettings())


def backends_text(text: str) -> str:
    """Return a list of backends, looked at as it is typed. Raises ArgumentTypeError: it names one that there is not."""
    from argparse import ArgumentTypeError

    from hil.controller.backends.references import references

    try:
        parse_targets(text, tuple(references()))
    except UsageError as error:
        raise ArgumentTypeError(f"{error.message} ({error.hint})" if error.hint else error.message) from None
    return text


def times_given(words: Iterable[object], *names: str) -> int:
    """How often an option is among the words of a command line."""
    return sum(str(word).partition("=")[0] in names for word in itertools.takewhile(lambda word: word != "--", words))


def refuse_second(name: str, count: int) -> None:
    """Raise UsageError where an option that has one value is given several times."""
    if count > 1:
        raise UsageError(f"{name} is given {count} times, and has one value", hint="leave all but one out")


TF = "tf"
TFLITE = "tflite"
_BOARD = "board:"
# What a module's programs can be for on a board; named after the board where it is not the board's own choice.
RUNTIMES = ("iree", TFLITE)
# Name -> IREE's driver and the compiler's flags, on this machine; none is what the simulated board is compiled for.
_IREE = MappingProxyType(
    {
        "iree_llvmcpu": ("local-task", ()),
        "iree_vmvx": ("local-task", ("--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=vmvx")),
        "iree_cuda": ("cuda", ("--iree-hal-target-device=cuda",)),
        "iree_vulkan": ("vulkan", ("--iree-hal-target-device=vulkan",)),
    }
)
PLAIN = (TF, *_IREE, TFLITE)


@dataclass(frozen=True)
class Backend:
    """A backend."""

    name: str  # as it was asked for, such as ``board:rpi5``
    # its folder's name: the name, numbered where it was asked for several times; of the reference with ``_ref``.
    id: str
    runtime: str  # ``tf``, ``iree`` or ``tflite``; of a reference of hil's its name
    choice: BoardChoice | None = None  # the board that it runs on; None if it is no board

    @property
    def hw_type(self) -> str:
        """The kind of hardware; "" of what is no board."""
        return self.choice.config.hw_type if self.choice else ""

    @property
    def board(self) -> str:
        """The board's name; "" of what is no board."""
        return self.choice.name if self.choice else ""

    @property
    def is_real(self) -> bool:
        """Whether it is a board that nobody else can have meanwhile: no simulator that is started for it alone."""
        return self.choice is not None and (bool(self.choice.address) or not self.choice.config.is_simulator)


def parse_backend(name: str, references: Sequence[str] = ()) -> Backend:
    """Return a backend by its name.

    ``tf`` is TensorFlow in this process; ``iree_llvmcpu``, ``iree_vmvx``, ``iree_cuda``, ``iree_vulkan`` and
    ``tflite`` run on this machine, behind a simulated board; ``board:NAME`` is any board that ``hil --board`` takes,
    and ``board:NAME:tflite`` or ``board:NAME:iree`` one with another runtime than its own.

    Args:
        references: names of hil's references that are backends as well, for modules that consist of files.

    Raises:
        UsageError: there is no such backend or board, or the board has no such runtime.
    """
    if name == TF or name in references:
        return Backend(name, name, name)
    if name in _IREE:
        return Backend(name, name, "iree", _simulated("iree", *_IREE[name]))
    if name == TFLITE:
        return Backend(name, name, TFLITE, _simulated(TFLITE))
    if name.startswith(_BOARD) and name != _BOARD:
        return _board(name)
    known = tuple(dict.fromkeys((ALL, *PLAIN, *references)))
    raise UsageError(
        f"there is no backend {name!r}", hint=f"{did_you_mean(name, known)}one of {', '.join(known)}, board:NAME"
    )


def relation_between(target: Backend, reference: Backend) -> Relation:
    """Return what the reference backend shares with a target; one on a board counts as the reference of its runtime."""
    from hil.controller.backends.references.independence import relation_of

    name = reference.runtime
    if reference.choice is not None:
        name = {"iree": "iree-llvm-cpu", TFLITE: "tflite-builtin"}.get(name, name)
    return relation_of(target.runtime, "tensorflow" if name == TF else name)


def parse_targets(text: str, references: Sequence[str] = ()) -> tuple[Backend, ...]:
    """Backends by a list of names with commas; one that is named several times is numbered from 0.

    ``all`` stands for every backend of this machine but TensorFlow itself.

    Raises:
        UsageError: as :func:`parse_backend`, or the list is empty.
    """
    words = [name.strip() for name in text.split(",") if name.strip()]
    names = [name for word in words for name in ((*_IREE, TFLITE) if word == ALL else (word,))]
    if not names:
        raise UsageError("--target_backends names none", hint="for example --target_backends=iree_llvmcpu")
    found = []
    for place, name in enumerate(names):
        number = f"_{names[:place].count(name)}" if names.count(name) > 1 else ""
        found.append(replace(parse_backend(name, references), id=folder_name(name) + number))
    return tuple(found)


def parse_reference(name: str, references: Sequence[str] = ()) -> Backend:
    """Return the backend that the others are compared with. Raises UsageError: as :func:`parse_backend`."""
    return replace(parse_backend(name, references), id=f"{folder_name(name)}_ref")


def folder_name(name: str) -> str:
    """Return a backend's name as a folder is called."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)


def _board(name: str) -> Backend:
    from hil.controller.devices.board_resolver import choose

    where, colon, runtime = name.removeprefix(_BOARD).rpartition(":")
    if not colon or runtime not in RUNTIMES:
        where, runtime = name.removeprefix(_BOARD), ""
    choice = choose(where)
    config = choice.config
    runtime = runtime or (config.runtime if config.runtime in RUNTIMES else RUNTIMES[0])
    if config.devices and runtime not in config.devices:
        raise UsageError(
            f"board {choice.name} has no runtime {runtime!r}", hint=f"its config has {', '.join(config.devices)}"
        )
    return Backend(name, name, runtime, choice)


def _simulated(runtime: str, device: str = "", flags: tuple[str, ...] = ()) -> BoardChoice:
    """Return the simulated board with another device of a runtime, and other flags of its compiler if there are any."""
    from hil.controller.devices.board_resolver import choose

    choice = choose("", "sim")
    compile_flags = {**choice.config.compile_flags, **({runtime: flags} if flags else {})}
    devices = {**choice.config.devices, runtime: device}
    return replace(choice, config=replace(choice.config, devices=devices, compile_flags=compile_flags))
