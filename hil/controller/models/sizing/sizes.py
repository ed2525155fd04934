"""Choose sizes for dynamic dimensions with a range: edges first, then a search for the smallest failing size."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

# First and last size of a dimension.
Range = Sequence[int]
MAX_SIZES = 12
# Widths of vectors and tiles at which compilers switch kernels, the most common first.
_TILES = (16, 64, 128, 8, 32, 4, 256, 512, 1024, 2048, 4096)
_RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")


def parse_range(text: str) -> tuple[int, int]:
    """Parse ``1..512`` into (1, 512).

    Raises ValueError for other texts. The error has a message only if the order of the sizes is wrong.
    """
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError
    if int(match[1]) > int(match[2]):
        raise ValueError(f"{match[1]} is above {match[2]}")
    return int(match[1]), int(match[2])


def format_range(sizes: Range) -> str:
    """Format a range for :func:`parse_range`."""
    return f"{sizes[0]}..{sizes[1]}"


def list_edge_sizes(low: int, high: int, most: int = MAX_SIZES) -> list[int]:
    """Return sizes in a range at which programs often fail: ends, 1, 2, and sizes near multiples of vectors and tiles.

    Returns:
        At most ``most`` sizes, ascending; all sizes in a short range.
    """
    tiles = (size for tile in _TILES for size in (tile, tile + 1, tile - 1))
    # Add the smallest sizes up to the maximum, so that a short range is tried completely.
    wanted = itertools.chain((low, high, 1, 2, high - 1, low + 1), tiles, range(low, min(high, low + most) + 1))
    inside = dict.fromkeys(size for size in wanted if low <= size <= high)
    return sorted(itertools.islice(inside, most))


def sweep(ranges: Mapping[str, Range], most: int = MAX_SIZES) -> list[dict[str, int]]:
    """Return the size combinations to try, in ascending order for a single range.

    With several ranges, the first combination has all dimensions at their lowest sizes, and the second has all at their
    highest sizes. The following combinations have one dimension at an edge size, and the others at their highest sizes.
    """
    if not ranges:
        return [{}]
    if len(ranges) == 1:
        ((name, (low, high)),) = ranges.items()
        return [{name: size} for size in list_edge_sizes(low, high, most)]
    highest = {name: high for name, (_, high) in ranges.items()}
    edges = [
        [{**highest, name: size} for size in list_edge_sizes(low, high, most)] for name, (low, high) in ranges.items()
    ]
    turns = (one for round_ in itertools.zip_longest(*edges) for one in round_ if one is not None)
    found: list[dict[str, int]] = []
    for one in itertools.chain(({name: low for name, (low, _) in ranges.items()}, highest), turns):
        if one not in found and len(found) < most:
            found.append(one)
    return found


def choose_next_size(low: int, failed: Mapping[int, bool]) -> int | None:
    """Return the next size in a search for the smallest failing size; None if the search is complete or nothing failed.

    The search bisects the sizes below the smallest failing size. It assumes that all larger sizes fail too.

    Args:
        low: smallest size in the range.
        failed: tried size -> whether it failed.
    """
    smallest = min((size for size, wrong in failed.items() if wrong), default=None)
    if smallest is None:
        return None
    passed = max((size for size, wrong in failed.items() if not wrong and size < smallest), default=low - 1)
    return None if smallest - passed <= 1 else (passed + smallest) // 2


def find_smallest_failing(tried: Mapping[tuple[int, ...], bool]) -> tuple[int, ...] | None:
    """Return the failing size combination with the smallest sum, or None."""
    return min((sizes for sizes, wrong in tried.items() if wrong), key=lambda one: (sum(one), one), default=None)


def choose_next_combination(
    ranges: Mapping[str, Range], tried: Mapping[tuple[int, ...], bool]
) -> dict[str, int] | None:
    """Return the next sizes in a search for a failing combination with minimal dimensions; None at the end.

    Args:
        ranges: dimension -> range.
        tried: sizes, in the order of ``ranges`` -> whether they failed.
    """
    failing = find_smallest_failing(tried)
    if failing is None:
        return None
    for place, (name, (low, _)) in enumerate(ranges.items()):
        line = dict(_line(failing, place, tried))
        if (size := choose_next_size(low, line)) is not None:
            return {**dict(zip(ranges, failing, strict=True)), name: size}
    return None


def _line(failing: tuple[int, ...], place: int, tried: Mapping[tuple[int, ...], bool]) -> Iterator[tuple[int, bool]]:
    """Yield (size, failed) of the combinations that differ from ``failing`` at most in dimension ``place``."""
    for sizes, wrong in tried.items():
        if all(one == other or at == place for at, (one, other) in enumerate(zip(sizes, failing, strict=True))):
            yield sizes[place], wrong


def format_sized_name(name: str, sizes: Mapping[str, int]) -> str:
    """Return the name of a model's case with these sizes: ``net_S-128``."""
    return "_".join([name, *(f"{symbol}-{size}" for symbol, size in sizes.items())])


def format_sizes(sizes: Mapping[str, int]) -> str:
    """Return sizes as text: ``S=128, N=1``."""
    return ", ".join(f"{symbol}={size}" for symbol, size in sizes.items())
