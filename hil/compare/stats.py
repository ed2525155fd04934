"""Define the statistics (:class:`Statistics`), and compute them in a single chunked pass over two tensors.

Values are widened chunk by chunk to float64, or to complex128 for complex dtypes. This is exact for every
dtype except 64-bit integers, which stay integers for equality and tolerance checks. Sums accumulate in
float64 or wider. Scratch memory is limited to a few chunks, independent of the tensor's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from hil.compare.ulp import LargestUlp
from hil.compare.values import CHUNK, EXACT_DTYPES, Floats, Reader, compute_dot, get_part_dtype, make_reader, mask_limit
from hil.core.file_tensor import Tensor
from hil.core.results import Tolerance
from hil.core.tensors import Array, get_dtype_name

_EXACT = Tolerance(0.0, 0.0)


@dataclass(frozen=True)
class Statistic:
    """Definition of a statistic: its title, how to format it, and how to compute it."""

    key: str
    title: str
    meaning: str  # Markdown text with the formula; `a` is the board's value, `b` the reference's
    value: Callable[[Sums], float | int | None]
    unit: str = ""  # unit of the value; "" if it has none
    masks: bool = True
    worst: Callable[..., Any] = max  # selects the worst value of multiple outputs: ``max`` or ``min``
    # When the terminal's table shows the column: ``always``; ``wide``, if there is space (the last such column is
    # dropped first); or "" for never.
    column: str = "wide"
    report: bool = True  # True if results.csv and report.html contain it; outputs.csv has every statistic
    digits: int = 3
    brief: str = ""  # format in a short summary; "" leaves it out

    @property
    def heading(self) -> str:
        """Title, followed by the unit if any."""
        return f"{self.title} {self.unit}".rstrip()


def _define_statistic(title: str, meaning: str, value: Callable[[Sums], float | int | None], **more: Any) -> Any:
    """Define a field of :class:`Statistics` from the arguments of :class:`Statistic`."""
    return field(default=None, metadata={"title": title, "meaning": meaning, "value": value, **more})


def _compute_cosine(sums: Sums) -> float | None:
    if sums.aa == 0 or sums.bb == 0:
        return 1.0 if sums.aa == sums.bb else 0.0
    cosine = float(sums.ab / (np.sqrt(sums.aa) * np.sqrt(sums.bb)))
    return None if math.isnan(cosine) else min(1.0, max(-1.0, cosine))


def _compute_sqnr_db(sums: Sums) -> float | None:
    if sums.dd == 0:
        return math.inf
    ratio = float(10 * (np.log10(sums.bb) - np.log10(sums.dd)))
    return None if math.isnan(ratio) else ratio


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of an output compared with its reference. Each field defines a row of the statistics table.

    Statistics cover the elements that are finite in both tensors. A statistic is None for strings, or if no
    dtype can represent the values of both tensors. It is also None if no element remains and the tensors
    differ.

    Statistics with ``masks=False`` exclude masked elements: a magnitude of at least :func:`mask_limit` and the same
    sign in both tensors. A mask of -3.4e38 has more energy than all visible values and would hide any error in the
    visible values. Masks in bit-equal tensors are not counted.
    """

    max_abs: float | None = _define_statistic(
        "max abs", "largest `abs(a - b)`", lambda sums: sums.max_abs, column="always", brief="max abs {:.3g}"
    )
    max_rel: float | None = _define_statistic(
        "max rel",
        "largest `abs(a - b) / abs(b)` where `b` is not 0",
        lambda sums: None if sums.bb == 0 and sums.dd > 0 and not sums.masked else sums.max_rel,
    )
    max_ulp: int | None = _define_statistic(
        "ULP",
        "largest number of representable values between `a` and `b`; none for integers and if the dtypes differ",
        lambda sums: None if sums.ulp is None else sums.ulp.largest,
        column="always",
        brief="{} ULP",
    )
    mean_abs: float | None = _define_statistic(
        "mean abs",
        "mean of `abs(a - b)`",
        lambda sums: float(sums.sum_abs / max(sums.finite, 1)),
        column="",
        report=False,
    )
    rmse: float | None = _define_statistic(
        "RMSE",
        "square root of the mean of `(a - b)^2`",
        lambda sums: float(np.sqrt(sums.dd / max(sums.visible, 1))),
        masks=False,
        column="",
    )
    cosine: float | None = _define_statistic(
        "cosine",
        "cosine of the angle between `a` and `b` as vectors; 1 is the same direction",
        _compute_cosine,
        masks=False,
        worst=min,
        digits=6,
    )
    sqnr_db: float | None = _define_statistic(
        "SQNR",
        "`10 log10(sum(b^2) / sum((a - b)^2))`; `inf` when equal; about 6 dB per bit of precision",
        _compute_sqnr_db,
        unit="dB",
        masks=False,
        worst=min,
        column="always",
        brief="{:.3g} dB",
    )


STATISTICS = tuple(Statistic(one.name, **one.metadata) for one in fields(Statistics))


def find_worst(outputs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the worst statistics of multiple outputs, and the sums of ``mismatches`` and ``elements``."""
    found = list(outputs)

    def list_known(key: str) -> list[Any]:
        return [output[key] for output in found if output.get(key) is not None]

    counts = {key: sum(list_known(key)) if list_known(key) else None for key in ("mismatches", "elements")}
    return counts | {one.key: one.worst(list_known(one.key), default=None) for one in STATISTICS}


def summarize(outputs: Iterable[Mapping[str, Any]]) -> str:
    """Summarize the worst statistics: ``0 of 10 out of tolerance, max abs 1.2e-07, 3 ULP, 141 dB``."""
    found = find_worst(outputs)
    if found["mismatches"] is None:
        return "no statistics available"
    briefs = [one.brief.format(found[one.key]) for one in STATISTICS if one.brief and found[one.key] is not None]
    return ", ".join([f"{found['mismatches']} of {found['elements']} out of tolerance", *briefs])


@dataclass(frozen=True)
class Stats(Statistics):
    """Result of :func:`measure`."""

    elements: int
    mismatches: int  # elements out of tolerance, including unmatched NaN and infinities
    nonfinite: int = 0  # number of NaN and infinities that the other tensor lacks
    masked: int = 0
    zeroed: bool = False  # True if every value is 0 although the reference has other values
    beside_zero: bool = False  # True if a value differs from a 0 in the reference
    # first, worst: flat indices (C order) of the first and the worst mismatch.
    first: int | None = None
    worst: int | None = None


def measure(
    actual: Tensor,
    reference: Tensor,
    tolerance: Tolerance | None,
    kind: str,
    chunk: int = CHUNK,
    *,
    allowed: Reader | None = None,
) -> Stats:
    """Compare two tensors of the same shape.

    Args:
        tolerance: an element is out of tolerance if ``|a-b| > atol + rtol*|b|``; None requires exact equality.
        kind: result of :func:`common_kind` for the two dtypes; "" is invalid.
        allowed: function that returns the extra difference allowed for every float element, as float64.
    """
    read_a, read_b, size = make_reader(actual), make_reader(reference), actual.size
    if kind == "string":
        return _measure_strings(read_a, read_b, size, chunk)
    sums = Sums(actual.dtype, reference.dtype, tolerance or _EXACT, kind, min(chunk, max(size, 1)), allowed)
    with np.errstate(all="ignore"):
        # Skip bit-equal chunks, because equal tensors need no statistics. After the first difference, another pass adds
        # the skipped chunks to the sums.
        equal = 0
        while equal < size and sums.has_same_bits(read_a(equal, equal + chunk), read_b(equal, equal + chunk)):
            equal += chunk
        if equal < size:
            for start in range(0, equal, chunk):
                sums.add_equal(read_b(start, start + chunk))
            for start in range(equal, size, chunk):
                sums.add(start, read_a(start, start + chunk), read_b(start, start + chunk))
        return sums.compute_stats(size)


def _measure_strings(read_a: Reader, read_b: Reader, size: int, chunk: int) -> Stats:
    mismatches, first = 0, None
    for start in range(0, size, chunk):
        a, b = (read(start, start + chunk).astype(object) for read in (read_a, read_b))
        differ = np.asarray(a != b, dtype=np.bool_)
        if first is None and differ.any():
            first = start + int(differ.argmax())
        mismatches += int(np.count_nonzero(differ))
    return Stats(size, mismatches, first=first, worst=first)


class Sums:
    """Running sums of a comparison, with scratch memory. Source of the statistics.

    Attributes:
        finite: count of elements that are finite in both tensors; set at the end.
        visible: count of finite elements that are not masked; set at the end.
        max_abs, max_rel, sum_abs: maximum of ``|a-b|``, maximum of ``|a-b|/|b|`` and sum of ``|a-b|``, over finite
            elements.
        ulp: largest distance of finite elements in representable values; None for integers and mixed dtypes.
        aa, ab, bb, dd: sums of ``a*a``, ``a*b``, ``b*b`` and ``(a-b)^2`` over visible elements, in float64 or wider.
        mismatches, nonfinite, masked: see :class:`Stats`.
    """

    def __init__(
        self,
        a: np.dtype[Any],
        b: np.dtype[Any],
        tolerance: Tolerance,
        kind: str,
        chunk: int,
        allowed: Reader | None = None,
    ) -> None:
        self.kind = kind
        self.tolerance = tolerance
        self.allowed = allowed
        self.parts = 2 if kind == "complex" else 1  # real numbers per element
        part_a, part_b = get_part_dtype(a), get_part_dtype(b)
        self.wide = np.float64 in (part_a, part_b)
        same = get_dtype_name(a) == get_dtype_name(b)
        self.bits = np.dtype(f"u{part_b.itemsize}") if same else None
        floating = same and get_dtype_name(part_b) not in EXACT_DTYPES
        self.ulp: LargestUlp | None = LargestUlp(part_b, chunk * self.parts) if floating else None

        self.mask_limits = mask_limit(a), mask_limit(b)
        # No value reaches the limit if the sum of squares is below the limit's square.
        self.mask_energy = np.longdouble(self.mask_limits[1]) ** 2

        reals = chunk * self.parts
        self.x, self.y, self.d = (np.empty(reals) for _ in range(3))
        self.equal = np.empty(reals, np.bool_)
        self.mask = self.equal[:chunk]
        self.difference = np.empty(reals, self.bits or np.uint8)

        self.aa: Any = 0.0  # float64, or long double if float64 was insufficient
        self.ab: Any = 0.0
        self.bb: Any = 0.0
        self.dd: Any = 0.0
        self.sum_abs: Any = 0.0
        self.max_abs: float = 0.0
        self.max_rel: float = 0.0
        self.beside_zero: bool = False
        self.mismatches: int = 0
        self.nonfinite: int = 0
        self.infinite: int = 0
        self.masked: int = 0
        self.finite: int = 0
        self.visible: int = 0
        self.first: int | None = None
        self.worst: int | None = None
        self.worst_excess: float = 0.0

    def has_same_bits(self, a: Array, b: Array) -> bool:
        """Return True if two chunks of the same dtype are bit-equal, including NaN."""
        if self.bits is None:
            return False
        equal = self.equal[: a.size * self.parts]
        return bool(np.equal(a.view(self.bits), b.view(self.bits), out=equal).all())

    def add_equal(self, b: Array) -> None:
        """Add the energy of a chunk that is bit-equal in both tensors. The chunk has no error."""
        y = self.y[: b.size * self.parts]
        y[...] = self._view_reals(b)
        energy = self._compute_dot(y, y)
        if not math.isfinite(energy):
            ok = self._mask_finite(y)
            self._drop(~ok, y)
            energy = self._compute_dot(y, y)
        if self._may_have_masks(y, energy):
            (y,) = self._remove_masks(y, y, y)
            energy = self._compute_dot(y, y)
        self._add_sums(energy, energy, energy, 0.0)

    def add(self, start: int, a: Array, b: Array) -> None:
        """Add a chunk that starts at the flat index ``start``."""
        count = a.size * self.parts
        if self.bits is not None:
            difference = self.difference[:count]
            highest = np.maximum.reduce(np.bitwise_xor(a.view(self.bits), b.view(self.bits), out=difference))
            if highest == 0:
                self.add_equal(b)
                return
        x, y, d = self.x[:count], self.y[:count], self.d[:count]
        x[...] = self._view_reals(a)
        y[...] = self._view_reals(b)
        np.subtract(x, y, out=d)
        sums = self._compute_sums(x, y, d)
        wrong: Array | None = None
        if not math.isfinite(sum(sums)):
            ok = self._mask_finite(x) & self._mask_finite(y)
            if not ok.all():
                wrong = self._mask_disagreeing(x, y, ok)
                self._drop(~ok, x, y, d)
                sums = self._compute_sums(x, y, d)
        if self._may_have_masks(y, sums[2]):
            sums = self._compute_sums(*self._remove_masks(x, y, x, y, d))
        self._add_sums(*sums)
        if self.ulp is not None and self.bits is not None:
            bits_a, bits_b = a.view(self.bits), b.view(self.bits)
            if wrong is not None:
                bits_a, bits_b = (np.where(np.repeat(ok, self.parts), bits, 0 * bits[:1]) for bits in (bits_a, bits_b))
                np.bitwise_xor(bits_a, bits_b, out=difference)
                highest = np.maximum.reduce(difference)
            self.ulp.add(bits_a, bits_b, difference, int(highest))
        if self.kind == "integer":
            self._add_integers(start, a, b, d, y)
        else:
            self._add_reals(start, *self._compute_magnitudes(d, y), wrong)

    def _add_reals(self, start: int, d: Floats, y: Floats, wrong: Array | None) -> None:
        """Add a chunk of real or complex numbers.

        Args:
            d: ``|a-b|``; used as scratch memory.
            y: ``|b|``; used as scratch memory.
            wrong: mask of unmatched NaN and infinities, or None.
        """
        rtol, atol = self.tolerance.rtol, self.tolerance.atol
        largest, relative = self._add_errors(d, y)
        # Rounding is monotonic: a quotient below rtol implies an error within rtol*|b|, so the exact check can be
        # skipped.
        if wrong is None and (largest <= atol or relative < rtol):
            return
        limit = np.multiply(y, rtol, out=y)
        limit += atol
        if self.allowed is not None:
            limit += self.allowed(start, start + d.size)
        out = np.greater(d, limit, out=self.mask[: d.size])
        if wrong is not None:
            out |= wrong
        excess = None
        if wrong is not None or largest - atol > self.worst_excess:
            excess = np.subtract(d, limit, out=d)
            if wrong is not None:
                excess[wrong] = np.inf
        self._add_mismatches(start, out, excess)

    def _add_integers(self, start: int, a: Array, b: Array, d: Floats, y: Floats) -> None:
        """Add a chunk of 64-bit integers. Float64 would round them, so |a-b| is computed and judged in uint64."""
        wide = np.result_type(a, b)
        a, b = a.astype(wide, copy=False), b.astype(wide, copy=False)
        # The true difference fits in uint64, and unsigned subtraction wraps to it.
        distance = np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)
        np.abs(y, out=y)
        d[...] = distance
        self._add_errors(d, y)
        limit = np.floor(np.multiply(y, self.tolerance.rtol) + self.tolerance.atol)
        over = limit >= 2.0**64
        whole = np.where(over, 0.0, limit).astype(np.uint64)
        out = (distance > whole) & ~over
        self._add_mismatches(start, out, np.where(out, distance - whole, np.uint64(0)))

    def _add_errors(self, d: Floats, y: Floats) -> tuple[float, float]:
        """Add the errors |a-b|, given |b|.

        Returns:
            The largest |a-b| and the largest |a-b|/|b|; the quotient is inf if b is 0 and a is not.
        """
        largest = float(np.maximum.reduce(d))
        self.max_abs = max(self.max_abs, largest)
        self.sum_abs += np.add.reduce(d)
        quotient = np.divide(d, y, out=self.x[: d.size])
        relative = above = float(np.fmax.reduce(quotient, initial=0.0))  # fmax ignores 0/0
        if relative == math.inf:
            self.beside_zero = True
            quotient[y == 0] = 0.0
            relative = float(np.fmax.reduce(quotient, initial=0.0))
        self.max_rel = max(self.max_rel, relative)
        return largest, above

    def _add_mismatches(self, start: int, out: Array, excess: Array | None) -> None:
        count = int(np.count_nonzero(out))
        if not count:
            return
        self.mismatches += count
        if self.first is None:
            self.first = start + int(out.argmax())
        if excess is not None:
            at = int(excess.argmax())
            over = excess[at].item()
            if over > self.worst_excess:
                self.worst_excess, self.worst = over, start + at

    def _compute_sums(self, x: Floats, y: Floats, d: Floats) -> tuple[Any, Any, Any, Any]:
        """Return the sums of x*x, x*y, y*y and d*d, where d is x-y."""
        yd, yy, dd = self._compute_dot(y, d), self._compute_dot(y, y), self._compute_dot(d, d)
        xx, xy = yy + 2 * yd + dd, yy + yd  # saves a product
        if not xx > 1e-3 * (yy + dd):  # cancellation, or a non-finite value
            xx, xy = self._compute_dot(x, x), self._compute_dot(x, y)
        return xx, xy, yy, dd

    def _add_sums(self, aa: Any, ab: Any, bb: Any, dd: Any) -> None:
        self.aa, self.ab, self.bb, self.dd = self.aa + aa, self.ab + ab, self.bb + bb, self.dd + dd

    def _compute_dot(self, x: Floats, y: Floats) -> Any:
        return compute_dot(x, y, wide=self.wide)

    def _view_reals(self, chunk: Array) -> Array:
        """Return the chunk as real numbers. A complex comparison has interleaved real and imaginary parts."""
        if self.parts == 1:
            return chunk
        pairs = chunk if chunk.dtype.kind == "c" else chunk.astype(np.complex128)
        return pairs.view(get_part_dtype(pairs.dtype))

    def _mask_finite(self, values: Floats) -> Array:
        return np.asarray(np.isfinite(values).reshape(-1, self.parts).all(axis=1))

    def _mask_disagreeing(self, x: Floats, y: Floats, ok: Array) -> Array:
        """Return a mask of elements with an unmatched NaN or infinity, and count them in ``nonfinite``."""
        same: Array = np.equal(x, y) | (np.isnan(x) & np.isnan(y))
        wrong: Array = np.asarray(~(ok | same.reshape(-1, self.parts).all(axis=1)))
        self.nonfinite += int(np.count_nonzero(wrong))
        return wrong

    def _drop(self, where: Array, *values: Floats) -> None:
        """Set elements to 0 that are excluded from the statistics."""
        self.infinite += int(np.count_nonzero(where))
        for reals in values:
            reals.reshape(-1, self.parts)[where] = 0.0

    def _may_have_masks(self, y: Floats, energy: Any) -> bool:
        # Fast path: if the energy is below the limit, there are no masks. In float16, ordinary values may reach the
        # limit.
        if not energy >= self.mask_energy:
            return False
        return bool(max(np.maximum.reduce(y), -np.minimum.reduce(y)) >= self.mask_limits[1])

    def _remove_masks(self, x: Floats, y: Floats, *values: Floats) -> list[Floats]:
        """Return copies of the values with 0 at masks, and count the masks. A mask needs the same sign in x and y."""
        low_x, low_y = self.mask_limits
        both = (np.abs(x) >= low_x) & (np.abs(y) >= low_y) & (np.signbit(x) == np.signbit(y))
        masks = both.reshape(-1, self.parts).any(axis=1)
        self.masked += int(np.count_nonzero(masks))
        return [np.where(np.repeat(masks, self.parts), 0.0, reals) for reals in values]

    def _compute_magnitudes(self, d: Floats, y: Floats) -> tuple[Floats, Floats]:
        if self.parts == 2:
            return np.hypot(d[0::2], d[1::2]), np.hypot(y[0::2], y[1::2])
        return np.abs(d, out=d), np.abs(y, out=y)

    def compute_stats(self, size: int) -> Stats:
        """Return the statistics for all added chunks. If none was added, the tensors are bit-equal."""
        self.finite = size - self.infinite
        self.visible = self.finite - self.masked
        # If there are mismatches, leave out statistics without elements: they would suggest agreement.
        known = [one for one in STATISTICS if not self.mismatches or (self.finite if one.masks else self.visible)]
        values: dict[str, Any] = {one.key: one.value(self) for one in known}
        return Stats(
            elements=size,
            mismatches=self.mismatches,
            nonfinite=self.nonfinite,
            masked=self.masked,
            zeroed=bool(self.aa == 0 and self.bb > 0 and not self.masked),
            beside_zero=self.beside_zero,
            first=self.first,
            worst=self.worst,
            **values,
        )
