"""Find the symbolic dimensions of models, and the matching sizes from the user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from hil.controller.models.generation.decode import import_decoder
from hil.controller.storage.run_context import RunContext
from hil.errors import HilError, StorageError, UsageError, did_you_mean

T = TypeVar("T")


def find_symbols(path: Path, context: RunContext, function: str = "") -> set[str]:
    """Return a model's symbolic dimensions. Unreadable models have no symbols. The model's case reports the error."""
    try:
        # A decoder may have several functions.
        model = import_decoder(path, function=function, isolated=context.isolated, cache=context.cache)
    except StorageError:
        raise
    except HilError:
        return set()
    return {dim for spec in model.inputs or () for dim in spec.shape if isinstance(dim, str)}


def own_sizes(sizes: Mapping[str, T], symbols: Iterable[str]) -> dict[str, T]:
    """Select the sizes or size ranges that apply to a model.

    Args:
        sizes: dimension -> size or size range.
        symbols: symbolic dimensions of the model.
    """
    known = set(symbols)
    return {name: size for name, size in sizes.items() if name in known}


def choose_model_sizes(
    paths: Sequence[Path], sizes: Mapping[str, T], context: RunContext, function: str = ""
) -> list[dict[str, T]]:
    """Return the sizes or size ranges for every model's dimensions.

    Raises:
        UsageError: a dimension does not exist in any model.
    """
    if not sizes:
        return [{} for _ in paths]
    symbols = [find_symbols(path, context, function) for path in paths]
    check_known(sizes, dict(zip(map(str, paths), symbols, strict=True)))
    return [own_sizes(sizes, own) for own in symbols]


def check_known(names: Iterable[str], symbols: Mapping[str, set[str]], option: str = "--dim") -> None:
    """Raise UsageError for a dimension that does not exist in any model.

    Args:
        names: dimensions.
        symbols: model label -> symbolic dimensions.
        option: option for the message.
    """
    known = {symbol for own in symbols.values() for symbol in own}
    if unknown := sorted(set(names) - known):
        models = [*list(symbols)[:5], *(["..."] if len(symbols) > 5 else [])]
        raise UsageError(
            f"{option} {unknown[0]}: dimension not found in {', '.join(models)}",
            hint=f"{did_you_mean(unknown[0], known)}symbolic dimensions: {', '.join(sorted(known)) or 'none'}",
        )
