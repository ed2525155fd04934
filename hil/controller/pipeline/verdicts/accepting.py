"""Check the criteria of ``--accept`` and load the Python functions that they name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.core.files import read_file
from hil.errors import UsageError, did_you_mean, format_expected

if TYPE_CHECKING:
    from hil.compare.criteria import Rule
    from hil.core.results import Model
    from hil.core.tensors import TensorSpec


def load_rules(texts: Sequence[str], option: str = "--accept") -> tuple[Rule, ...]:
    """Parse the texts of ``--accept`` and load the functions that they name.

    Raises:
        UsageError: invalid text, or a function cannot be loaded.
    """
    if not texts:
        return ()
    from hil.compare.criteria import parse_accept

    return parse_accept(texts, load_function, option)


def check_accepted_outputs(cases: Iterable[tuple[Sequence[str], Model | None]]) -> None:
    """Raise UsageError if criteria name an output that none of the models with these criteria has.

    Args:
        cases: Pairs of criteria (texts of ``--accept`` or of the project file) and model. The model's outputs may be
            unknown.
    """
    known: dict[tuple[str, ...], list[tuple[TensorSpec, ...] | None]] = {}
    for texts, model in cases:
        if texts and model is not None:
            known.setdefault(tuple(texts), []).append(model.outputs)
    for texts, found in known.items():
        from hil.compare.criteria import check_outputs

        if None not in found:
            check_outputs(load_rules(texts), [spec.name for outputs in found for spec in outputs or ()])


def load_function(file: str, name: str, *, form: str = "python:FILE:FUNCTION") -> Callable[..., Any]:
    """Return a function of a Python file.

    Args:
        form: How the user specifies a function, for the hint.

    Raises UsageError if the function does not exist or the file fails to load.
    """
    path = Path(file).expanduser()
    try:
        modified = path.stat().st_mtime_ns
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", hint=f"use {form}") from error
    names = _run_file(path.resolve(), modified)
    function = names.get(name)
    if not callable(function):
        known = [one for one, value in names.items() if callable(value) and not one.startswith("_")]
        raise UsageError(
            f"function {name!r} not found in {path}",
            hint=f"{did_you_mean(name, known)}{format_expected(known, 'known functions: ')}",
        )
    made: Callable[..., Any] = function
    return made


@lru_cache(maxsize=32)
def _run_file(path: Path, modified: int) -> dict[str, Any]:
    """Return the names that a Python file defines.

    Args:
        modified: Modification time. The time is part of the cache key, so that a changed file is loaded again.
    """
    spec = importlib.util.spec_from_loader(f"hil_accept_{path.stem}", loader=None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    try:
        exec(compile(read_file(path), str(path), "exec"), vars(module))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code may raise anything, even SystemExit
        raise UsageError(f"{path} cannot be loaded: {type(error).__name__}: {error}"[:500]) from error
    return vars(module)
