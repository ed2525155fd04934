"""Inputs from a file next to the model, and from Python functions of the command line."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from hil.controller.storage.paths import is_file, make_sibling_path
from hil.errors import UsageError

if TYPE_CHECKING:
    from hil.core.tensors import Array


class InputSettings(Protocol):
    """Fields of :class:`hil.controller.pipeline.settings.options.RunSettings` that select a model's inputs."""

    @property
    def inputs(self) -> Sequence[str] | Mapping[str, Array]:
        """Inputs of the user."""

    @property
    def input_range(self) -> tuple[float, float] | None:
        """Range of random inputs."""

    @property
    def generate(self) -> Path | None:
        """Specification of generations."""


class FunctionLoader(Protocol):
    """Loader of a user's Python function."""

    def __call__(self, file: str, name: str, *, form: str) -> Callable[..., Any]:
        """Return the function. Raises UsageError if the function does not exist, or the file fails to load."""


S = TypeVar("S", bound=InputSettings)
# End of the file next to the model: net.inputs.npz has inputs by name for net.onnx.
SUFFIX = ".inputs.npz"
_FUNCTION = re.compile(
    r"(?:(?P<name>.+)=)?(?P<file>[^=]*\.py):(?P<function>[A-Za-z_]\w*)(?:\[(?P<number>[0-9]{1,6})\])?"
)
_FORM = "FILE.py:FUNCTION"


def find_inputs_file(model: Path) -> Path | None:
    """Return the file with inputs next to a model, or None."""
    file = make_sibling_path(model, SUFFIX)
    return file if is_file(file) else None


def add_inputs_file(options: S, model: Path) -> S:
    """Return the options with the inputs of the file next to the model.

    hil ignores the file if the user gives inputs, a range of random inputs, or a specification of generations.
    """
    if options.inputs or options.input_range is not None or options.generate is not None:
        return options
    file = find_inputs_file(model)
    return options if file is None else cast(S, replace(cast(Any, options), inputs=(str(file),)))


def describe_inputs_file(before: InputSettings, after: InputSettings, model: Path) -> str:
    """Return a note for the user if :func:`add_inputs_file` added inputs, else ""."""
    file = None if before.inputs or not after.inputs else find_inputs_file(model)
    return f"{model.name}: inputs from {file.name}" if file else ""


def call_functions(texts: Sequence[str], load: FunctionLoader, option: str = "--input") -> tuple[str, ...]:
    """Replace each ``[NAME=]FILE.py:FUNCTION`` of the command line by a file with the function's tensors.

    Stored runs, farm jobs and flag files then contain only files with tensors, and never run code of other users.

    Args:
        load: loads a function by file path and name; ``form`` is for the hint.

    Raises:
        UsageError: a function fails, or its result is not a sample of tensors.
    """
    return tuple(_call(found, load, option) if (found := _FUNCTION.fullmatch(text)) else text for text in texts)


def _call(found: re.Match[str], load: FunctionLoader, option: str) -> str:
    """Call a function and write the tensors to the cache. Return the text with the file's path."""
    from hil.controller.models.inputs import as_array, digest_of_samples
    from hil.controller.storage.cache import Cache
    from hil.controller.storage.tensor_files import save_npz
    from hil.core.npy import make_storable

    name, text = found["name"], found[0]
    where = f"{option} {text}"
    # A file may print, but stdout may contain a JSON document.
    with contextlib.redirect_stdout(sys.stderr):
        function = load(found["file"], found["function"], form=f"{option} {_FORM}")
        sample = _choose_sample(function, found, where)
    if isinstance(sample, Mapping):
        tensors = {str(key): as_array(f"{where}: {key}", value) for key, value in sample.items()}
    elif isinstance(sample, (list, tuple)):
        tensors = {f"arr_{number}": as_array(f"{where}: {number}", value) for number, value in enumerate(sample)}
    else:
        tensors = {"arr_0": as_array(where, sample)}
    if name is not None and name not in tensors:
        if len(tensors) != 1:
            held = ", ".join(tensors) or "none"
            raise UsageError(f"{where}: the function returns no tensor {name!r}", hint=f"tensors: {held}")
        tensors = {name: next(iter(tensors.values()))}
    if not tensors:
        raise UsageError(f"{where}: the function returns no tensors", hint="return a dict: name of an input -> array")

    # Errors about the tensors contain the name of the file.
    file = f"{re.sub('[^A-Za-z0-9_-]', '_', Path(found['file']).stem)[:80]}.{found['function'][:80]}.npz"

    def write(folder: Path) -> None:
        save_npz(folder / file, {key: make_storable(array) for key, array in tensors.items()})

    key = Cache.key("given", tensors=digest_of_samples([tensors]), file=file)
    path = Cache().get_or_make(key, {"from": text}, write)[0] / file
    return f"{path}" if name is None else f"{name}={path}:{name}"


def _choose_sample(function: Callable[..., Any], found: re.Match[str], where: str) -> Any:
    """Return the result of a function, or one sample if the function returns or yields multiple."""
    number = int(found["number"] or 0)
    try:
        result = function()
        if isinstance(result, (list, tuple)) and result and all(isinstance(one, Mapping) for one in result):
            result = iter(result)
        if not isinstance(result, Iterator):
            samples = [result]
        else:
            samples = list(itertools.islice(result, number, number + (2 if found["number"] is None else 1)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code may raise anything, even SystemExit
        raise UsageError(
            f"{where} failed: {type(error).__name__}: {error}"[:500], detail=traceback.format_exc()
        ) from error
    if not samples or (number and not isinstance(result, Iterator)):
        raise UsageError(f"{where}: the function has no sample {number}", hint="samples have numbers from 0")
    if len(samples) > 1:
        raise UsageError(
            f"{where}: the function yields several samples, expected one",
            hint=f"select a sample: {found[0]}[0]; to run all samples, use hil eval --dataset or hil suite run",
        )
    return samples[0]
