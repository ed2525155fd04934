"""Tables of a profile's operations. Totals are cached unsorted; the query determines the order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from hil.controller.analysis.profile.diff import OpDiff, ProfileDiff, compare_profiles
from hil.controller.analysis.profile.store import HEAD, TABLE, read_profile
from hil.controller.analysis.profile.totals import GROUPS, sum_rows
from hil.controller.analysis.roofline.peak_store import PEAKS_FILE
from hil.controller.analysis.roofline.report import build_report
from hil.controller.records.commands.stored import ProfileTotal
from hil.controller.records.measurements.roofline import RooflineReport
from hil.controller.web.text.addresses import PageQuery, choose_page
from hil.controller.web.text.parameters import InvalidParameter
from hil.errors import UsageError

T = TypeVar("T")
PAGE_ROWS = 200
# Number of profiles to cache, because reading a million operations takes seconds.
_CACHED_PROFILES = 8

_TOTAL_ORDERS: Mapping[str, Callable[[ProfileTotal], Any]] = {
    "name": lambda one: one.name,
    "time": lambda one: one.run_ns,
    "calls": lambda one: one.calls,
    "mean": lambda one: one.mean_ns,
    "p50": lambda one: one.p50_ns,
    "threads": lambda one: one.parallelism,
    "speed": lambda one: one.flops_per_s,
    "memory": lambda one: one.bytes_per_s,
    "intensity": lambda one: one.intensity,
}
_DIFF_ORDERS: Mapping[str, Callable[[OpDiff], Any]] = {
    "name": lambda one: one.name,
    "change": lambda one: one.change or None,
    "a": lambda one: one.a.p50_ns if one.a else None,
    "b": lambda one: one.b.p50_ns if one.b else None,
    "of_a": lambda one: one.a.share if one.a else None,
    "of_b": lambda one: one.b.share if one.b else None,
    "difference": lambda one: one.change_ns,
    "ratio": lambda one: one.ratio,
}


@dataclass(frozen=True)
class TableQuery(PageQuery):
    """Query parameters for an operations table."""

    by: str = "op"  # from GROUPS
    order: str = ""  # column, with "-" for descending order; "" is the library's default order
    page: int = 1


@dataclass(frozen=True)
class TablePage:
    """Rows on a table page, and the table size."""

    rows: Sequence[Any]
    total: int
    pages: int


def read_totals(folder: Path, by: str) -> Sequence[ProfileTotal]:
    """Return a profile's totals, longest first. Raises UsageError for an unknown group or a damaged profile."""
    if by not in GROUPS:
        raise InvalidParameter.choose("grouping", by, GROUPS)
    return _read_totals(folder, _stamp_profile(folder), by)


def read_diff(a: Path, b: Path) -> ProfileDiff:
    """Return the difference between two profiles. Raises UsageError if a profile is damaged."""
    return _read_diff(a, _stamp_profile(a), b, _stamp_profile(b))


def read_roofline(folder: Path, by: str) -> RooflineReport | None:
    """Return the roofline of a profile with the peaks in its directory; None without peaks.

    Raises UsageError for an unknown group, or if the profile or the peaks are damaged.
    """
    if by not in GROUPS:
        raise InvalidParameter.choose("grouping", by, GROUPS)
    try:
        peaks = (folder / PEAKS_FILE).stat()
    except OSError:
        return None
    return _read_roofline(folder, (*_stamp_profile(folder), peaks.st_ino, peaks.st_mtime_ns, peaks.st_size), by)


def select_totals(found: Sequence[ProfileTotal], asked: TableQuery, rows: int) -> TablePage:
    """Return a page of totals. Raises UsageError for an unknown order."""
    return _make_page(_sort_rows(found, asked.order, _TOTAL_ORDERS), asked.page, rows)


def select_diffs(found: Sequence[OpDiff], asked: TableQuery, rows: int) -> TablePage:
    """Return a page of differences. Raises UsageError for an unknown order."""
    return _make_page(_sort_rows(found, asked.order, _DIFF_ORDERS), asked.page, rows)


def _sort_rows(found: Sequence[T], order: str, orders: Mapping[str, Callable[[T], Any]]) -> Sequence[T]:
    """Sort by a column. Rows without a value are last in both directions."""
    if not order:
        return found
    value = orders.get(order.removeprefix("-"))
    if value is None:
        raise InvalidParameter.choose("order", order, orders)
    known = [one for one in found if value(one) is not None]
    unknown = [one for one in found if value(one) is None]
    return [*sorted(known, key=value, reverse=order.startswith("-")), *unknown]


def _make_page(found: Sequence[Any], page: int, rows: int) -> TablePage:
    start, pages = choose_page(page, len(found), rows)
    return TablePage(found[start : start + rows], len(found), pages)


def _stamp_profile(folder: Path) -> tuple[int, ...]:
    """Return a stamp that changes if the profile is rewritten."""
    try:
        looks = [(folder / name).stat() for name in (HEAD, TABLE)]
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror or error}") from error
    return tuple(value for look in looks for value in (look.st_ino, look.st_mtime_ns, look.st_size))


@lru_cache(_CACHED_PROFILES)
def _read_totals(folder: Path, _: tuple[int, ...], by: str) -> Sequence[ProfileTotal]:
    return sum_rows(read_profile(folder).rows, by)


@lru_cache(_CACHED_PROFILES)
def _read_diff(a: Path, _: tuple[int, ...], b: Path, __: tuple[int, ...]) -> ProfileDiff:
    return compare_profiles(read_profile(a), read_profile(b))


@lru_cache(_CACHED_PROFILES)
def _read_roofline(folder: Path, _: tuple[int, ...], by: str) -> RooflineReport:
    return build_report(folder, by=by)
