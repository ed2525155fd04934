"""The symbolic dimensions of models, and which of the sizes that the user gave are a model's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from hil.controller.models.importers import import_model
from hil.controller.storage.run_context import RunContext
from hil.errors import HilError, StorageError, UsageError, did_you_mean

T = TypeVar("T")


def symbols_of(path: Path, context: RunContext, function: str = "") -> set[str]:
    """Return a model's symbolic dimensions; none of a model that cannot be read, which its case reports."""
    try:
        model = import_model(path, function=function, isolated=context.isolated, cache=context.cache)
    except StorageError:
        raise
    except HilError:
        return set()
    return {dim for spec in model.inputs or () for dim in spec.shape if isinstance(dim, str)}


def own_sizes(sizes: Mapping[str, T], symbols: Iterable[str]) -> dict[str, T]:
    """Return the sizes, or ranges of sizes, of dimensions that a model has."""
    known = set(symbols)
    return {name: size for name, size in sizes.items() if name in known}


def sizes_of_models(
    paths: Sequence[Path], sizes: Mapping[str, T], context: RunContext, function: str = ""
) -> list[dict[str, T]]:
    """Return for each model the sizes, or ranges of sizes, of the dimensions that it has.

    Raises:
        UsageError: no model has one of the dimensions.
    """
    if not sizes:
        return [{} for _ in paths]
    symbols = [symbols_of(path, context, function) for path in paths]
    check_known(sizes, dict(zip(map(str, paths), symbols, strict=True)))
    return [own_sizes(sizes, own) for own in symbols]


def check_known(names: Iterable[str], symbols: Mapping[str, set[str]], option: str = "--dim") -> None:
    """Raise UsageError for a dimension that no model has.

    Args:
        symbols: model, as messages name it -> its symbolic dimensions.
    """
    known = {symbol for own in symbols.values() for symbol in own}
    if unknown := sorted(set(names) - known):
        models = [*list(symbols)[:5], *(["..."] if len(symbols) > 5 else [])]
        what = f"{models[0]} has no" if len(models) == 1 else f"none of {', '.join(models)} has a"
        raise UsageError(
            f"{option} {unknown[0]}: {what} dimension of that name",
            hint=f"{did_you_mean(unknown[0], known)}symbolic dimensions: {', '.join(sorted(known)) or 'all fixed'}",
        )
