"""Judge a board that computes in a declared arithmetic, using a control run on the host.

The control runs the same model in that arithmetic repeatedly: rounded to nearest, and with stochastic rounding. The
deviation of the control from float32 shows how far correct outputs are from the reference. The board may deviate by
:data:`FACTOR` times this deviation, in root mean square and in the largest element. hil checks the whole output, each
channel, and elements of similar magnitude. Groups without enough elements in the control are skipped.

Some operators jump: a small rounding difference changes the decision of Floor, ArgMax or a comparison. Jumps do not
widen the bound, because the deviation is measured with the decisions of the float32 run. If a jump moves an element out
of the bound, the element must have a value that the control produced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hil.compare.groups import Channels, Groups, Magnitudes
from hil.compare.values import CHUNK, EXACT_DTYPES, Reader
from hil.core.arithmetic import FLOATS
from hil.core.results import Control, Deviation, Tolerance
from hil.core.tensors import Array, get_dtype_name

# Two bits of margin: the control has only a few runs, and hardware may accumulate in the narrow arithmetic.
FACTOR = 4.0
# Above this fraction of jumping elements, the output is BLIND unless it matches a control run.
MAX_JUMP_SHARE = 0.1
# If zeros would satisfy the bound in more than this fraction of channels, the output is BLIND.
MAX_BLIND_SHARE = 0.25
# Maximum number of jumping elements stored in a control.
MAX_JUMPS = 20_000
# Minimum size of a channel or magnitude group. The arithmetic must change at least half of its elements.
_MIN_ELEMENTS = 4
_MAX_CHANNELS = 4096
# Number of clipped weights listed in a reason.
_MAX_LISTED = 4
_NOTHING = Tolerance(0.0, 0.0)
_STILL = Deviation(0.0, 0.0)


def measure_control(
    arithmetic: str, source: str, exact: Array, held: Sequence[Array], free: Sequence[Array]
) -> Control | None:
    """Measure how far an arithmetic moves an output.

    Args:
        exact: the output in float32.
        held: outputs from repeated runs in the arithmetic, with jumping operators fixed to their float32 decisions.
        free: outputs from repeated runs in the arithmetic, with jumping operators left free.

    Returns:
        The control, or None if the arithmetic has no effect or the output is not numeric.
    """
    free = [one for one in free if one.shape == exact.shape]
    if exact.dtype.kind in "OUSc" or not exact.size or any(one.shape != exact.shape for one in held):
        return None
    base = _widen(exact)
    moved, over = False, np.zeros(base.size, np.bool_)
    for one in held:
        errors = _flatten_distances(one, base)
        moved |= bool(errors.any())
        over |= ~np.isfinite(errors)  # elements that overflow have no finite deviation
    if not moved and not any(_flatten_distances(one, base).any() for one in free):
        return None
    control = _measure_deviations(arithmetic, source, exact.shape, base, held, over)
    limits = Bound(control, exact, _NOTHING).limits
    jumps = over
    for one in {id(one): one for one in (*held, *free)}.values():
        jumps |= _flatten_distances(one, base) > limits
    places = np.flatnonzero(jumps)
    kept = places[:MAX_JUMPS]
    values = np.array([_widen(one.reshape(-1)[kept]) for one in free]).reshape(len(free), len(kept)).T.tolist()
    jumping = {place: tuple(runs) for place, runs in zip(kept.tolist(), values, strict=True)}
    return replace(control, jumps=jumping, jumping=len(places))


def _measure_deviations(
    arithmetic: str, source: str, shape: tuple[int, ...], base: Array, held: Sequence[Array], over: Array
) -> Control:
    magnitudes, axes = Magnitudes(base), find_channel_axes(shape)
    groups: tuple[Groups, ...] = (Channels(shape), magnitudes, *(Channels(shape, axis) for axis in axes))
    measured = [_Measured(one, over) for one in groups]
    for run in held:
        errors = _flatten_distances(run, base)
        errors[over] = 0.0
        for one in measured:
            one.add(errors)
    (whole,), sizes, *along = (
        one.compute_deviations(least=_MIN_ELEMENTS * bool(number)) for number, one in enumerate(measured)
    )
    return Control(
        arithmetic,
        source,
        whole or _STILL,
        dict(zip(axes, along, strict=True)),
        {exponent: one for exponent, one in zip(magnitudes.exponents, sizes, strict=True) if one is not None},
    )


class _Measured:
    """Deviation of groups of elements over repeated runs, excluding elements that overflow."""

    def __init__(self, groups: Groups, over: Array) -> None:
        self._groups = groups
        self._counts = groups.count() - groups.sum_squares(over.astype(np.float64))
        self._squares, self._largest, self._moved = (np.zeros(self._counts.size) for _ in range(3))
        self._runs = 0

    def add(self, errors: Array) -> None:
        """Add the errors of one run."""
        self._squares = np.maximum(self._squares, self._groups.sum_squares(errors))
        self._largest = np.maximum(self._largest, self._groups.find_largest(errors))
        self._moved += self._groups.sum_squares((errors != 0).astype(np.float64))
        self._runs += 1

    def compute_deviations(self, least: int) -> tuple[Deviation | None, ...]:
        """Return the deviation of each group, or None for a group with too few elements or too few changed elements."""
        found = zip(self._counts, self._squares, self._largest, self._moved, strict=True)
        return tuple(self._compute_deviation(*one, least) for one in found)

    def _compute_deviation(
        self, count: float, squares: float, largest: float, moved: float, least: int
    ) -> Deviation | None:
        if least and count >= least and not moved:
            return _STILL  # the arithmetic does not change the values: class numbers, flags
        if count < max(least, 1) or (least and 2 * moved < count * self._runs):
            return None
        return Deviation(math.sqrt(squares / count), float(largest))


def find_channel_axes(shape: tuple[int, ...]) -> list[int]:
    """Return the axes that may be channel axes: the second and the last."""
    found = {1, len(shape) - 1} if len(shape) > 1 else set()
    return [axis for axis in sorted(found) if 1 < shape[axis] <= _MAX_CHANNELS]


def _flatten_distances(one: Array, base: Array) -> Array:
    """Return |a-b| of each element as a flat array."""
    flat, found = one.reshape(-1), np.empty(base.size)
    for start in range(0, base.size, CHUNK):
        part = slice(start, start + CHUNK)
        found[part] = _compute_distance(_widen(flat[part]), base[part])
    return found


def _compute_distance(one: Array, base: Array) -> Array:
    """Return |a-b| of each element: 0 for two equal infinities or two NaN, infinity if only one value is not finite."""
    with np.errstate(invalid="ignore"):
        error = np.abs(one - base)
    if np.isfinite(error).all():
        return np.asarray(error)
    same = (one == base) | (np.isnan(one) & np.isnan(base))
    return np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))


def _widen(array: Array) -> Array:
    return array.reshape(-1).astype(np.float64)


def _get_eps(arithmetic: str) -> float:
    """Return the relative step of an arithmetic; 0 for int8, which does not round results."""
    return FLOATS[arithmetic].eps if arithmetic in FLOATS else 0.0


class _Deviating:
    """Groups of elements with their deviation limits. A limit is infinite if the control has too few elements.

    Args:
        name: name of a group in messages; ``{}`` stands for the group's number. "" means all elements.
    """

    def __init__(self, groups: Groups, deviations: Sequence[Deviation | None], name: str = "") -> None:
        self.groups = groups
        self.name = name
        self.known = np.array([one is not None for one in deviations], np.bool_)
        self.rms, self.largest = (
            np.array([math.inf if one is None else FACTOR * getattr(one, key) for one in deviations], np.float64)
            for key in ("rms", "largest")
        )


@dataclass(frozen=True)
class Finding:
    """Result of judging an output against a control."""

    wrong: Array  # flat mask of the elements that exceed the bound
    reason: str = ""  # why the output differs; "" if it agrees
    doubt: str = ""  # why the output cannot be judged although it agrees
    note: str = ""  # further remarks


class Bound:
    """Bound that a control sets for an output, given its reference.

    Args:
        plain: the tolerance for a float32 board, from the dtype and scale.
    """

    def __init__(self, control: Control, reference: Array, plain: Tolerance) -> None:
        self._control = control
        self._shape = reference.shape
        self._wanted = _widen(reference)
        self._whole_numbers = get_dtype_name(reference.dtype) in EXACT_DTYPES
        self._atol = plain.atol
        # Allow one extra step of the arithmetic: the board may round a result more often than the control.
        self._rtol = plain.rtol + (0.0 if self._whole_numbers else _get_eps(control.arithmetic))
        magnitudes = np.abs(self._wanted)
        magnitudes[~np.isfinite(magnitudes)] = 0.0
        self._groups = self._read_control(control)
        self.limits, self._floor = (np.full(self._wanted.size, one) for one in (np.inf, plain.atol))
        whole, *_ = _compute_rms(self._groups[0].groups, magnitudes)
        for one in self._groups:
            one.groups.clip(self.limits, one.largest)
            # Scale the default tolerance to each group's values: an output may mix scores and pixel coordinates.
            own = _compute_rms(one.groups, magnitudes)
            share = np.where(one.known & (own > 0), np.minimum(1.0, own / (whole or 1.0)), 1.0)
            one.groups.clip(self._floor, plain.atol * share)
        magnitudes *= self._rtol
        self._floor += magnitudes
        self.limits += self._floor
        self._allowed = [one.rms + _compute_rms(one.groups, self._floor) for one in self._groups]
        self._jumps = np.zeros(self._wanted.size, np.bool_)
        self._places = np.fromiter(control.jumps, np.int64, len(control.jumps))
        self._jumps[self._places] = True
        # Values of the jumping elements, one row per run.
        self._values = (
            np.array(list(control.jumps.values()), np.float64)
            .reshape(len(self._places), -1 if len(self._places) else 0)
            .T
        )
        has_infinity = ~np.isfinite(self._values).all(axis=0)
        self._is_overflowing = has_infinity & np.isfinite(self._wanted[self._places])
        self._overflowing = int(np.count_nonzero(self._is_overflowing))

    def _read_control(self, control: Control) -> list[_Deviating]:
        magnitudes = Magnitudes(self._wanted)
        sizes = [control.sizes.get(exponent) for exponent in magnitudes.exponents]
        channels = [
            _Deviating(Channels(self._shape, axis), along, f"channel {{}} of axis {axis}")
            for axis, along in control.axes.items()
        ]
        return [
            _Deviating(Channels(self._shape), [control.whole]),
            _Deviating(magnitudes, sizes, "elements of similar magnitude"),
            *channels,
        ]

    @property
    def tolerance(self) -> Tolerance:
        """Widest tolerance that the bound allows for any element."""
        return Tolerance(self._rtol, self._atol + FACTOR * self._control.whole.largest)

    def compute_excess(self, actual: Array, places: Array) -> Array:
        """Return how far elements exceed their limits, by flat index."""
        return np.asarray(
            _compute_distance(_widen(actual.reshape(-1)[places]), self._wanted[places]) - self.limits[places]
        )

    @property
    def record(self) -> dict[str, Any]:
        """Bound as stored in records and reports; ``rmse`` and ``max_abs`` are limits for the whole output."""
        whole = self._control.whole
        return {
            "arithmetic": self._control.arithmetic,
            "source": self._control.source,
            "factor": FACTOR,
            "rmse": FACTOR * whole.rms,
            "max_abs": FACTOR * whole.largest,
            "jumping": self._control.jumping,
        }

    def judge(self, actual: Array) -> Finding:
        """Judge a board output that has the reference's shape."""
        given = _widen(actual)
        error = _flatten_distances(given, self._wanted)
        error[self._jumps] = 0.0
        wrong = error > self.limits
        jumping = self._control.jumping
        doubt = self._find_overflow_doubt()
        if jumping > len(self._places):
            return Finding(np.zeros_like(wrong), doubt=doubt or f"{self._format_jumps()}, more than can be judged")
        wrong[self._places] = self._is_no_jump(given[self._places])
        if not doubt and jumping > MAX_JUMP_SHARE * wrong.size and not self._is_some_run(given):
            doubt = (
                f"{self._format_jumps()}, more than {MAX_JUMP_SHARE:.0%}, and the output matches no run of the control"
            )
        if self._wanted.any() and not given.any():
            return Finding(wrong, "every value is 0, but the reference has other values")
        if wrong.any():
            return Finding(wrong, self._format_wrong(wrong, given))
        if far := self._find_large_error(error):
            return Finding(wrong, far)
        blind, few = self._find_blind_channels()
        doubt = doubt or self._find_accepted_wrong_answer() or blind
        notes = (self._format_overflow(), self._format_jumps(), few)
        return Finding(wrong, doubt=doubt, note="; ".join(one for one in notes if one and one not in doubt))

    def _is_no_jump(self, given: Array) -> Array:
        """Return a mask of the jumping elements with a value that the control does not explain."""
        known = np.vstack([self._wanted[self._places], self._values])
        same = (known == given) | (np.isnan(known) & np.isnan(given))
        if self._whole_numbers:
            return np.asarray(~same.any(axis=0))
        # An infinity explains only an infinity of the same sign, never a finite value.
        finite = np.isfinite(known)
        low = np.min(known, axis=0, where=finite, initial=np.inf)
        high = np.max(known, axis=0, where=finite, initial=-np.inf)
        with np.errstate(invalid="ignore", over="ignore"):
            room = high - low + self.limits[self._places]
            between = finite.any(axis=0) & (given >= low - room) & (given <= high + room)
        return np.asarray(~(same.any(axis=0) | between))

    def _is_some_run(self, given: Array) -> bool:
        """Return True if the jumping elements match a single run of the control."""
        limits = self.limits[self._places]
        return any(bool((_compute_distance(given[self._places], run) <= limits).all()) for run in self._values)

    def _find_large_error(self, error: Array) -> str:
        """Return a reason if a group's error is too large although each element is within its limit; otherwise ""."""
        for one, allowed in zip(self._groups, self._allowed, strict=True):
            found = _compute_rms(one.groups, error)
            for place in np.flatnonzero(found > allowed)[:1]:
                where = f" of {one.name.format(place)}" if one.name else ""
                return (
                    f"error{where} (RMSE {found[place]:.3g}) exceeds the limit for {self._control.arithmetic} "
                    f"({allowed[place]:.3g})"
                )
        return ""

    def _agrees(self, read: Reader) -> bool:
        """Return True if the limits accept a wrong output. ``read`` returns the output in chunks."""
        eps, differs = _get_eps(self._control.arithmetic), False
        errors = np.empty(self._wanted.size)
        for start in range(0, errors.size, CHUNK):
            stop = min(start + CHUNK, errors.size)
            part = slice(start, stop)
            wanted = self._wanted[part]
            errors[part] = error = np.where(self._jumps[part], 0.0, _compute_distance(read(start, stop), wanted))
            if not (error <= self.limits[part]).all():
                return False
            differs = differs or bool((error > self._floor[part] - eps * np.abs(wanted)).any())
        return differs and not self._find_large_error(errors)

    def _find_accepted_wrong_answer(self) -> str:
        # The doubled reference is as far from the reference as zeros, so testing zeros covers both.
        wanted = self._wanted
        others: dict[str, Reader] = {
            "zeros": lambda start, stop: np.zeros(stop - start),
            "every sign flipped": lambda start, stop: -wanted[start:stop],
            "values in a different order": lambda start, stop: wanted[np.arange(start - 1, stop - 1)],
        }
        found = [name for name, read in others.items() if self._agrees(read)]
        name = self._control.arithmetic
        text = f"the error of {name} is so large that a wrong output would pass: {', '.join(found)}"
        return f"{text}{self._format_clipped()}" if found else ""

    def _find_blind_channels(self) -> tuple[str, str]:
        """Check the channels in which zeros would satisfy the bound.

        Return (doubt, note): a doubt for many such channels, a note for a few.
        """
        notes = []
        _, _, *channels = self._groups
        for axis, one in zip(self._control.axes, channels, strict=True):
            own = _compute_rms(one.groups, self._wanted)
            blind = np.flatnonzero(one.known & (own > 0) & (own <= one.rms))
            if not blind.size:
                continue
            known = int(np.count_nonzero(one.known))
            text = (
                f"in {len(blind)} of {known} channels of axis {axis}, {self._control.arithmetic} deviates "
                f"by as much as the values: {', '.join(map(str, blind[:8]))}{', ...' * (len(blind) > 8)}"
            )
            if len(blind) > MAX_BLIND_SHARE * known:
                return text, ""
            notes.append(text)
        return "", "; ".join(notes)

    def _find_overflow_doubt(self) -> str:
        """Return a reason if too many values overflow to judge the output; otherwise ""."""
        if self._overflowing <= MAX_JUMP_SHARE * self._wanted.size:
            return ""
        return f"{self._format_overflow()}: the model does not fit this arithmetic{self._format_clipped()}"

    def _format_overflow(self) -> str:
        least = "at least " * (self._control.jumping > len(self._places))
        text = f"{least}{self._overflowing} of {self._wanted.size} values overflow {self._control.arithmetic}"
        return text if self._overflowing else ""

    def _format_clipped(self) -> str:
        names = self._control.clipped
        listed = ", ".join(names[:_MAX_LISTED]) + ", ..." * (len(names) > _MAX_LISTED)
        return f"; {self._control.arithmetic} clips out-of-range weights: {listed}" if names else ""

    def _format_jumps(self) -> str:
        count = self._control.jumping - self._overflowing
        if not count:
            return ""
        # The first stored element that does not overflow.
        place = int(self._places[np.argmin(self._is_overflowing)])
        first = [int(index) for index in np.unravel_index(place, self._shape)]
        arithmetic = self._control.arithmetic
        return (
            f"{count} of {self._wanted.size} elements change abruptly with rounding in {arithmetic}, first at {first}"
        )

    def _format_wrong(self, wrong: Array, given: Array) -> str:
        place = int(np.flatnonzero(wrong)[0])
        index = [int(one) for one in np.unravel_index(place, self._shape)]
        count = int(np.count_nonzero(wrong))
        values = f"{given[place]:.9g}, the reference has {self._wanted[place]:.9g}"
        how = "not among the values of the control" if self._jumps[place] else f"bound {self.limits[place]:.3g}"
        return (
            f"{count} of {wrong.size} values deviate by more than {FACTOR:g} times the error of "
            f"{self._control.arithmetic}, first at {index}: {values} ({how})"
        )


def _compute_rms(groups: Groups, values: Array) -> Array:
    """Return the root mean square of each group's values."""
    return np.asarray(np.sqrt(groups.sum_squares(values) / groups.count()))
