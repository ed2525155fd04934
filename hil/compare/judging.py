"""Judge output values against a reference: right, wrong, or impossible to judge."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hil.compare.allowance import Allowance
from hil.compare.reasons import count, explain_values, index_of
from hil.compare.small import check_small, compute_relative_limit
from hil.compare.stats import Stats, measure
from hil.compare.tolerance import Scale, find_blindness, narrow_tolerance
from hil.compare.values import CHUNK, make_reader
from hil.core.file_tensor import Tensor
from hil.core.results import Tolerance


@dataclass(frozen=True)
class Judged:
    """Judgement on an output's values."""

    stats: Stats | None  # None if the values could not be compared
    tolerance: Tolerance | None  # tolerance used, noise included; None requires exact equality
    reason: str = ""  # why the values are wrong
    doubt: str = ""  # why a wrong output would also agree, if the values are not wrong


def judge_values(
    actual: Tensor,
    reference: Tensor,
    tolerance: Tolerance | None,
    scale: Scale,
    *,
    kind: str,
    given: bool,
    allowed: Allowance | None,
) -> Judged:
    """Judge two tensors of the same shape.

    Args:
        tolerance: tolerance without noise; None requires exact equality.
        scale: the reference's scale.
        kind: result of :func:`hil.compare.values.choose_common_kind` for the two dtypes; "" is invalid.
        given: True if the user gave the tolerance.
        allowed: allowance for the reference's noise, if measured.
    """
    stats = measure(actual, reference, tolerance, kind, allowed=allowed.slice_allowed if allowed else None)
    if tolerance is None:
        return Judged(stats, None, explain_values(actual, reference, None, stats))
    found = Judged(stats, widen_tolerance(tolerance, allowed))
    if reason := explain_values(actual, reference, found.tolerance, stats):
        return _judge_out_of_tolerance(actual, reference, tolerance, replace(found, reason=reason), kind, allowed)
    if _is_all_nan(reference, scale):
        return replace(found, doubt="every value is NaN on both sides: no number was compared")
    if not stats.max_abs:
        return found
    if doubt := _find_doubt(found, scale, given, allowed):
        found = replace(found, doubt=doubt)
        closer = narrow_tolerance(scale)
        near = Judged(
            measure(actual, reference, closer, kind, allowed=allowed.slice_allowed if allowed else None),
            widen_tolerance(closer, allowed),
        )
        if not allowed or _count_mismatches(near) or _find_doubt(near, scale, False, allowed):
            return found
        return near
    limit = compute_relative_limit(reference, tolerance, given=given)
    if stats.max_rel is not None and (stats.max_rel > limit or stats.beside_zero):
        return _judge_small_values(actual, reference, tolerance, found, given, allowed)
    return found


def widen_tolerance(tolerance: Tolerance, allowed: Allowance | None) -> Tolerance:
    """Return the tolerance that covers all elements except unsteady elements."""
    return replace(tolerance, atol=tolerance.atol + allowed.widest) if allowed else tolerance


def _judge_out_of_tolerance(
    actual: Tensor, reference: Tensor, tolerance: Tolerance, found: Judged, kind: str, allowed: Allowance | None
) -> Judged:
    """Judge an output that is out of tolerance. The reference's rounding noise may explain the differences."""
    if not allowed or (found.stats and found.stats.nonfinite):
        return found
    if unsteady := format_unsteady(allowed):
        found = replace(found, reason=f"{found.reason}; {unsteady}")
    stats = measure(actual, reference, tolerance, kind, allowed=allowed.slice_noise)
    if stats.mismatches:
        return found
    doubt = (
        f"{_count_mismatches(found)} of {count(stats.elements, 'value')} out of tolerance, but within the rounding "
        f"noise of the reference ({allowed.largest:.2g}): cannot be judged"
    )
    # If all values are only noise, the board may return exactly 0.
    return Judged(replace(stats, zeroed=False), replace(tolerance, atol=tolerance.atol + allowed.largest), doubt=doubt)


def format_unsteady(allowed: Allowance) -> str:
    """Return a line that lists the elements with noise above the ceiling; "" if none."""
    if not allowed.unsteady:
        return ""
    shape = allowed.reference.shape
    places = ", ".join(str(list(index_of(place, shape) or ())) for place in allowed.first)
    more = ", ..." if allowed.unsteady > len(allowed.first) else ""
    share = f"{allowed.unsteady} of {count(allowed.reference.size, 'value')}"
    rule = "hil accepts a difference of this size for each" if allowed.is_rare else "too many to widen the tolerance"
    return f"rounding changes {share} by more than {allowed.share:.2g} times their scale ({rule}), at {places}{more}"


def _find_doubt(found: Judged, scale: Scale, given: bool, allowed: Allowance | None) -> str:
    assert found.stats is not None and found.tolerance is not None
    noise = allowed.widest if allowed else None
    return find_blindness(found.tolerance, scale, noise=noise, given=given) or _find_excess_error(
        found.stats, scale, given
    )


def _count_mismatches(found: Judged) -> int:
    return found.stats.mismatches if found.stats else 0


def _judge_small_values(
    actual: Tensor, reference: Tensor, tolerance: Tolerance, found: Judged, given: bool, allowed: Allowance | None
) -> Judged:
    small = check_small(actual, reference, tolerance, given=given, allowed=allowed)
    if small is None or found.stats is None:
        return found
    if allowed is None or not small.lost:
        return replace(found, doubt=small.reason)
    stats = replace(found.stats, mismatches=small.lost, first=small.first, worst=small.first)
    return replace(found, stats=stats, reason=small.reason)


def _is_all_nan(reference: Tensor, scale: Scale) -> bool:
    if not reference.size or scale.largest:
        return False
    read = make_reader(reference)
    return all(bool(np.isnan(read(start, start + CHUNK)).all()) for start in range(0, reference.size, CHUNK))


def _find_excess_error(stats: Stats, scale: Scale, given: bool) -> str:
    """Return a reason if an output within its tolerance is still wrong; otherwise ""."""
    if given and not scale.largest:
        return ""  # the user specified the allowed distance from 0
    if stats.sqnr_db is not None and stats.sqnr_db < 0:
        return f"within tolerance, but the error exceeds the signal (SQNR {stats.sqnr_db:.3g} dB)"
    if stats.cosine is not None and stats.cosine < 0:
        return f"within tolerance, but in the opposite direction of the reference (cosine {stats.cosine:.3g})"
    return ""
