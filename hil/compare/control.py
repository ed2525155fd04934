"""Judge a board that computes in a declared arithmetic by a control: the same model in that arithmetic on the host.

The control runs a few times: rounded to nearest, and by chance. Its deviation from float32 is a sample of how far any
right answer is from the reference. The board may deviate :data:`FACTOR` times as far, in the root mean square and in
the largest element: over the whole output, over each channel, and over elements of one magnitude, wherever the control
has enough elements to tell. What operators that jump (Floor, ArgMax, comparisons) make of rounding widens nothing: the
deviation is measured with their decisions held, and elements that they move out of the bound must have values that the
control gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hil.compare.values import EXACT_DTYPES
from hil.core.arithmetic import FLOATS
from hil.core.results import Control, Deviation, Tolerance
from hil.core.tensors import Array, dtype_name

# Two bits: the control is a sample of a few runs, and hardware may accumulate in the arithmetic itself.
FACTOR = 4.0
# Above this share of jumping elements, an answer must be that of one run of the control, else nobody can judge it.
MAX_JUMP_SHARE = 0.1
# Above this share of channels within whose bound zeros agree, the output is BLIND.
MAX_BLIND_SHARE = 0.25
# Elements of jumps that a control keeps.
MAX_JUMPS = 20_000
# A channel or magnitude tells with so many elements, of which at least half move.
_LEAST_ELEMENTS = 4
_MAX_CHANNELS = 4096
_NOTHING = Tolerance(0.0, 0.0)


def control_of(
    arithmetic: str, source: str, exact: Array, held: Sequence[Array], free: Sequence[Array]
) -> Control | None:
    """Measure how far an arithmetic moves an output.

    Args:
        exact: the output in float32.
        held: the same in the arithmetic, several times, operators that jump deciding as they do in float32.
        free: the same, operators deciding for themselves.

    Returns:
        None where it moves nothing, or the output holds no numbers.
    """
    free = [one for one in free if one.shape == exact.shape]
    if exact.dtype.kind in "OUSc" or not exact.size or any(one.shape != exact.shape for one in held):
        return None
    base = _wide(exact)
    values = np.stack([_wide(one) for one in (*held, *free)])
    errors = np.stack([_distance(one, base) for one in values])
    if not errors.any():
        return None
    # What overflows has no deviation either.
    over = ~np.isfinite(errors[: len(held)]).all(axis=0)
    control = _measured(arithmetic, source, exact.shape, base, errors[: len(held)], over)
    limits = Bound(control, exact, _NOTHING).limits
    jumps = over | (errors > limits).any(axis=0)
    places = np.flatnonzero(jumps)
    kept = {int(place): tuple(map(float, values[len(held) :, place])) for place in places[:MAX_JUMPS]}
    return replace(control, jumps=kept, jumping=len(places))


def _measured(arithmetic: str, source: str, shape: tuple[int, ...], base: Array, errors: Array, over: Array) -> Control:
    errors = np.where(over, np.nan, errors)
    axes = {axis: _along(errors.reshape(-1, *shape), axis + 1) for axis in _channel_axes(shape)}
    exponents = _exponents(base)
    sizes = {int(one): _deviation(errors[:, exponents == one]) for one in np.unique(exponents[~np.isnan(exponents)])}
    return Control(
        arithmetic,
        source,
        _deviation(errors, least=0) or Deviation(0.0, 0.0),
        axes,
        {exponent: one for exponent, one in sizes.items() if one is not None},
    )


def _along(errors: Array, axis: int) -> tuple[Deviation | None, ...]:
    """The deviation of each index along an axis of errors by run."""
    moved = np.moveaxis(errors, axis, 0)
    return tuple(_deviation(one.reshape(one.shape[0], -1)) for one in moved)


def _deviation(errors: Array, least: int = _LEAST_ELEMENTS) -> Deviation | None:
    """The deviation of elements, an array of errors by run (NaN is left out); None where they are too few to tell."""
    there = ~np.isnan(errors[0])
    errors = errors[:, there]
    if least and errors.shape[1] >= least and not errors.any():
        return Deviation(0.0, 0.0)  # the arithmetic does not move them: class numbers, flags
    if errors.shape[1] < max(least, 1) or (least and np.count_nonzero(errors) * 2 < errors.size):
        return None
    return Deviation(float(np.sqrt(np.mean(errors**2, axis=1)).max()), float(errors.max()))


def _channel_axes(shape: tuple[int, ...]) -> list[int]:
    """The axes along which channels may be: the second and the last one."""
    found = {1, len(shape) - 1} if len(shape) > 1 else set()
    return [axis for axis in sorted(found) if 1 < shape[axis] <= _MAX_CHANNELS]


def _exponents(base: Array) -> Array:
    """The exponent of 16 of each magnitude; NaN for zeros and what is not finite."""
    with np.errstate(all="ignore"):
        found = np.floor(np.log2(np.abs(base)) / 4)
    return np.where(np.isfinite(found), found, np.nan)


def _distance(one: Array, base: Array) -> Array:
    """|a-b| of each element: 0 where both are the same infinity or NaN, infinite where only one is."""
    with np.errstate(invalid="ignore"):
        error = np.abs(one - base)
    same = (one == base) | (np.isnan(one) & np.isnan(base))
    return np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))


def _wide(array: Array) -> Array:
    return array.reshape(-1).astype(np.float64)


def _eps(arithmetic: str) -> float:
    """The relative step of an arithmetic's values; int8 rounds no results."""
    return FLOATS[arithmetic].eps if arithmetic in FLOATS else 0.0


@dataclass(frozen=True)
class Finding:
    """What a control finds of an output."""

    wrong: Array  # of each element, flat, whether it is out of its bound
    reason: str = ""  # why the output differs; "" where it does not
    doubt: str = ""  # why nobody can judge it though it does not differ
    note: str = ""  # what else to know of it


class Bound:
    """The bound that a control sets for an output, given its reference.

    Args:
        plain: the tolerance of a board that computes in float32, by dtype and scale.
    """

    def __init__(self, control: Control, reference: Array, plain: Tolerance) -> None:
        self._control = control
        self._shape = reference.shape
        self._wanted = _wide(reference)
        self._whole_numbers = dtype_name(reference.dtype) in EXACT_DTYPES
        # One step of the arithmetic more: the board may round a result once more than the control.
        magnitudes = np.where(np.isfinite(self._wanted), np.abs(self._wanted), 0.0)
        self._atol = plain.atol
        self._rtol = plain.rtol + (0.0 if self._whole_numbers else _eps(control.arithmetic))
        exponents = _exponents(self._wanted).reshape(self._shape)
        groups: list[tuple[Any, Deviation]] = [(..., control.whole)]
        groups += [(exponents == exponent, one) for exponent, one in control.sizes.items()]
        groups += [
            ((slice(None),) * axis + (place,), one)
            for axis, along in control.axes.items()
            for place, one in enumerate(along)
            if one is not None
        ]
        limits, atol = np.full(self._shape, np.inf), np.full(self._shape, plain.atol)
        sizes, whole = magnitudes.reshape(self._shape), _rms(magnitudes)
        for group, deviation in groups:
            limits[group] = np.minimum(limits[group], FACTOR * deviation.largest)
            # The default tolerance of a group follows the group's own values: scores beside pixel coordinates.
            if own := _rms(sizes[group]):
                atol[group] = np.minimum(atol[group], plain.atol * min(1.0, own / whole))
        self._groups = groups
        self._floor = atol.reshape(-1) + self._rtol * magnitudes
        self.limits = limits.reshape(-1) + self._floor
        self._jumps = np.zeros(self._wanted.size, np.bool_)
        self._places = np.fromiter(control.jumps, np.int64, len(control.jumps))
        self._jumps[self._places] = True
        # Run by run, the values of the elements that jump.
        self._values = (
            np.array(list(control.jumps.values()), np.float64)
            .reshape(len(self._places), -1 if len(self._places) else 0)
            .T
        )

    @property
    def tolerance(self) -> Tolerance:
        """The widest that it allows of any element."""
        return Tolerance(self._rtol, self._atol + FACTOR * self._control.whole.largest)

    def excess(self, actual: Array) -> Array:
        """How far each element is out of its limit."""
        return np.asarray(_distance(_wide(actual), self._wanted) - self.limits)

    @property
    def record(self) -> dict[str, Any]:
        """What records and reports tell of it: ``rmse`` and ``max_abs`` of all elements are limits."""
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
        """Judge what a board computed, of the reference's shape."""
        given = _wide(actual)
        error = _distance(given, self._wanted)
        error[self._jumps] = 0.0
        wrong = error > self.limits
        jumping = self._control.jumping
        if jumping > len(self._places):
            return Finding(np.zeros_like(wrong), doubt=f"{self._jump_text()}, too many to judge")
        wrong[self._places] = self._is_no_jump(given[self._places])
        doubt = ""
        if jumping > MAX_JUMP_SHARE * wrong.size and not self._is_some_run(given):
            doubt = f"{self._jump_text()}, more than {MAX_JUMP_SHARE:.0%}, and the answer is none of the control's"
        if self._wanted.any() and not given.any():
            return Finding(wrong, "every value is 0, the reference's are not")
        if wrong.any():
            return Finding(wrong, self._wrong_text(wrong, given))
        if far := self._too_far(error):
            return Finding(wrong, far)
        blind, few = self._blind_channels()
        note = "; ".join(filter(None, (self._jump_text(), few)))
        return Finding(wrong, doubt=doubt or self._agreeing_wrong_answer() or blind, note=note)

    def _is_no_jump(self, given: Array) -> Array:
        """Of each element that jumps, whether its value is none that the control explains."""
        known = np.vstack([self._wanted[self._places], self._values])
        same = (known == given) | (np.isnan(known) & np.isnan(given))
        if self._whole_numbers:
            return np.asarray(~same.any(axis=0))
        # An infinity explains an infinity of its sign, and no finite value.
        finite = np.isfinite(known)
        low = np.min(known, axis=0, where=finite, initial=np.inf)
        high = np.max(known, axis=0, where=finite, initial=-np.inf)
        with np.errstate(invalid="ignore"):
            room = high - low + self.limits[self._places]
            between = finite.any(axis=0) & (given >= low - room) & (given <= high + room)
        return np.asarray(~(same.any(axis=0) | between))

    def _is_some_run(self, given: Array) -> bool:
        """Whether the elements that jump are those of one run of the control."""
        limits = self.limits[self._places]
        return any(bool((_distance(given[self._places], run) <= limits).all()) for run in self._values)

    def _too_far(self, error: Array) -> str:
        """Why the error is too large in all, though no element's is; "" where it is not."""
        error, floor = error.reshape(self._shape), self._floor.reshape(self._shape)
        for group, deviation in self._groups:
            own, allowed = _rms(error[group]), FACTOR * deviation.rms + _rms(floor[group])
            if own > allowed:
                where = "" if group is ... else f" of {self._group_text(group)}"
                name = self._control.arithmetic
                return f"the error{where} (RMSE {own:.3g}) is more than {name} explains ({allowed:.3g})"
        return ""

    def _agrees(self, other: Array) -> bool:
        """Whether another answer than the reference would agree with it."""
        error = np.where(self._jumps, 0.0, _distance(other, self._wanted))
        plain = self._floor - _eps(self._control.arithmetic) * np.abs(self._wanted)
        return bool((error > plain).any() and (error <= self.limits).all() and not self._too_far(error))

    def _agreeing_wrong_answer(self) -> str:
        others = {
            "zeros": np.zeros_like(self._wanted),
            "every sign flipped": -self._wanted,
            "its values in another order": np.roll(self._wanted, 1),
        }
        found = [name for name, other in others.items() if self._agrees(other)]
        name = self._control.arithmetic
        return f"{name} moves it so far that a wrong answer would agree: {', '.join(found)}" if found else ""

    def _blind_channels(self) -> tuple[str, str]:
        """Why channels within whose bound zeros agree are too many; and a note where they are few."""
        wanted, notes = self._wanted.reshape(self._shape), []
        for axis, along in self._control.axes.items():
            known = [place for place, one in enumerate(along) if one is not None]
            blind = [
                place
                for place in known
                if 0 < _rms(np.take(wanted, place, axis)) <= FACTOR * getattr(along[place], "rms", 0.0)
            ]
            if not blind:
                continue
            text = (
                f"{self._control.arithmetic} moves {len(blind)} of {len(known)} channels of axis {axis} "
                f"as far as their values: {', '.join(map(str, blind[:8]))}{', ...' * (len(blind) > 8)}"
            )
            if len(blind) > MAX_BLIND_SHARE * len(known):
                return text, ""
            notes.append(text)
        return "", "; ".join(notes)

    def _jump_text(self) -> str:
        count = self._control.jumping
        if not count:
            return ""
        first = [int(place) for place in np.unravel_index(int(self._places[0]), self._shape)]
        return f"{count} of {self._wanted.size} elements jump in {self._control.arithmetic}, first at {first}"

    def _wrong_text(self, wrong: Array, given: Array) -> str:
        place = int(np.flatnonzero(wrong)[0])
        index = [int(one) for one in np.unravel_index(place, self._shape)]
        count = int(np.count_nonzero(wrong))
        values = f"{given[place]:.9g}, the reference has {self._wanted[place]:.9g}"
        how = "which is no value of the control" if self._jumps[place] else f"bound {self.limits[place]:.3g}"
        return (
            f"{count} of {wrong.size} values further off than {FACTOR:g} times what "
            f"{self._control.arithmetic} explains, first at {index}: {values} ({how})"
        )

    def _group_text(self, group: Any) -> str:
        if isinstance(group, tuple):
            return f"channel {group[-1]} of axis {len(group) - 1}"
        return "the elements of one magnitude"


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(values**2))) if values.size else 0.0
