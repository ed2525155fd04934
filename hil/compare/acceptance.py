"""Judge an output by named criteria instead of a tolerance.

Shape and dtype must match. NaN and infinities must be at the same positions unless all criteria are functions or
unordered sets. An output is BLIND if its criteria would also accept a wrong output. Wrong outputs are the negated
reference, the doubled reference, zeros, and shuffles of the reference (if at least half of them are accepted). All
criteria of an output are tested together, so a single strict criterion is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from hil.compare.comparison import CriterionResult, OutputComparison
from hil.compare.criteria import Criterion
from hil.compare.measures import Pair
from hil.compare.sampling import sample_of
from hil.compare.small import name_places
from hil.compare.small_columns import find_column_axes, find_small
from hil.compare.values import EXACT_DTYPES, choose_common_kind, find_largest, get_part_dtype
from hil.core.file_tensor import Tensor
from hil.core.tensors import Array, get_dtype_name, get_float_limits, get_int_limits
from hil.errors import CriterionFailed, UsageError

# Number of shuffled references. The criteria must reject more than half. Large tensors use few shuffles: each shuffle
# takes a full pass, and with many elements, agreement by chance varies little.
SHUFFLES, FEW_SHUFFLES = 9, 3
_LARGE = 1 << 16
_SEED = 33
_REASON_LENGTH = 500


def judge_criteria(
    plain: OutputComparison, actual: Tensor, reference: Tensor, criteria: Sequence[Criterion], *, allow_blind: bool
) -> OutputComparison:
    """Judge an output by criteria.

    Args:
        plain: result of comparing the output within a tolerance, used for its statistics.
        allow_blind: True if the output may pass although wrong outputs would also pass.

    Raises:
        UsageError: a criterion cannot be computed for this output.
        VacuousTolerance: a criterion cannot fail for this output.
        CriterionFailed: a user's function raised, or returned an unsupported value.
    """
    kind = choose_common_kind(plain.dtype, plain.reference_dtype)
    if plain.shape != plain.reference_shape or plain.dtype != plain.reference_dtype or not plain.elements:
        return plain
    pair = Pair(actual, reference, plain.tolerance, kind, plain)
    if plain.nonfinite and any(criterion.is_positional for criterion in criteria):
        return replace(plain, passed=False, blind=False)
    results = tuple(_judge(plain.name, criterion, pair, actual, reference) for criterion in criteria)
    failed = [result for result in results if not result.passed]
    reason = "; ".join(map(_explain, failed))
    doubt = "" if reason else _find_doubt(plain.name, criteria, plain, reference, kind)
    notes = () if reason or doubt else _write_notes(plain, criteria, reference, kind)
    return replace(
        plain,
        passed=not reason and (allow_blind or not doubt),
        reason=reason or doubt,
        blind=bool(doubt),
        criteria=results,
        notes=notes,
    )


def _judge(name: str, criterion: Criterion, pair: Pair, actual: Tensor, reference: Tensor) -> CriterionResult:
    if criterion.measure is None:
        return _call(criterion, np.array(actual), np.array(reference))
    try:
        value = criterion.measure.value(pair, **criterion.arguments)
    except UsageError as error:
        raise type(error)(f"output {name}: {criterion.text}: {error.message}", hint=error.hint) from error
    passed = value is not None and criterion.accepts(value)
    return CriterionResult(criterion.text, value, criterion.bound, passed)


def _call(criterion: Criterion, actual: Array, reference: Array) -> CriterionResult:
    """Call a user's function with copies, so that it cannot change the reported arrays."""
    assert criterion.function is not None
    try:
        returned = criterion.function(actual, reference)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code may raise anything, including SystemExit
        raise CriterionFailed(
            f"{criterion.text} raised {type(error).__name__}: {str(error)[:_REASON_LENGTH]}",
            hint="correct the function; the arguments are the board's array and the reference's array",
        ) from error
    reason = ""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], str):
        returned, reason = returned
    if isinstance(returned, np.ndarray) and returned.ndim == 0:
        returned = returned[()]
    if isinstance(returned, (bool, np.bool_)) and criterion.bound is None:
        return CriterionResult(criterion.text, None, None, bool(returned), reason[:_REASON_LENGTH])
    is_number = isinstance(returned, (int, float, np.integer, np.floating)) and not isinstance(returned, bool)
    if is_number and criterion.bound is not None:
        value = float(returned)
        return CriterionResult(
            criterion.text, value, criterion.bound, criterion.accepts(value), reason[:_REASON_LENGTH]
        )
    wanted = "a bool or (bool, text)" if criterion.bound is None else "a number or (number, text)"
    raise CriterionFailed(
        f"{criterion.text} returned {_describe(returned)}: expected {wanted}",
        hint="a function that returns a number needs a bound, such as python:FILE:FUNCTION>=0.9" if is_number else "",
    )


def _describe(value: Any) -> str:
    return repr(value)[:80] if isinstance(value, (bool, int, float, str, type(None))) else f"a {type(value).__name__}"


def _explain(result: CriterionResult) -> str:
    if result.value is None:
        why = "is not met" if result.bound is None else "cannot be measured: no finite values"
    else:
        why = f"is not met: the value is {result.value:.6g}"
    return f"{result.criterion} {why}" + (f" ({result.reason})" if result.reason else "")


def _find_doubt(name: str, criteria: Sequence[Criterion], plain: OutputComparison, reference: Tensor, kind: str) -> str:
    """Name a wrong output that the criteria would accept. Return "" if they reject all wrong outputs."""
    array = np.asarray(reference)
    if kind == "string" or not array.size:
        return ""
    measured = [one for one in criteria if one.measure is not None]
    accepts = _make_acceptor(name, criteria, plain, array, kind)
    listed = ", ".join(criterion.text for criterion in criteria)
    wrong_answers = {"the reference with every sign flipped": _negate, "zeros": _zero}
    # Criteria that measure only direction ignore the scale by design; a note reports that.
    if not _judge_classes(criteria) and not _are_of_direction(criteria):
        wrong_answers["the reference at a different scale"] = _scale
    for what, change in wrong_answers.items():
        if accepts(change):
            return f"{listed} would accept {what}"
    # Skip shuffles for unordered criteria of a single column: every shuffle is the same set.
    is_single_column = array.ndim < 2 or array.shape[-1] == 1
    if is_single_column and all(not one.is_positional and one.measure is not None for one in criteria):
        return ""
    few = array.size > _LARGE or len(measured) < len(criteria)
    tried = [accepts(partial(_shuffle, seed=seed)) for seed in range(FEW_SHUFFLES if few else SHUFFLES)]
    wrong = [one for one in tried if one is not None]
    if wrong and 2 * sum(wrong) >= len(wrong):
        return f"{listed} would accept the reference's values in any order"
    return ""


def _make_acceptor(
    name: str,
    criteria: Sequence[Criterion],
    plain: OutputComparison,
    array: Array,
    kind: str,
    whole: Sequence[int] = (),
) -> Callable[[Callable[[Array], Array]], bool | None]:
    """Return a function that checks whether the criteria accept a changed reference.

    The function returns None if the change has no effect. For a large output, the function tries a sample first.
    User functions always receive whole outputs.

    Args:
        whole: extra axes that a sample must contain completely.
    """
    measured = [one for one in criteria if one.measure is not None]
    axes = _find_whole_axes(measured, array.ndim) | {axis % array.ndim for axis in whole}
    sample = sample_of(array, axes) if measured else None

    def accepts(change: Callable[[Array], Array]) -> bool | None:
        if sample is not None and _accept(name, measured, plain, change(sample), sample, kind) is False:
            return False
        wrong = change(array)
        return None if _is_equal(wrong, array) else _accept(name, criteria, plain, wrong, array, kind)

    return accepts


def _write_notes(
    plain: OutputComparison, criteria: Sequence[Criterion], reference: Tensor, kind: str
) -> tuple[str, ...]:
    """Return notes on errors that the criteria ignore in a passing output."""
    listed = ", ".join(criterion.text for criterion in criteria)
    notes = [f"{listed} ignores the scale: twice the reference would pass"] * _are_of_direction(criteria)
    if kind == "string" or _judge_classes(criteria):
        return tuple(notes)
    array = np.asarray(reference)
    for axis in find_column_axes(array.ndim):
        small = find_small(array, axis)
        if small.size and _make_acceptor(plain.name, criteria, plain, array, kind, [axis])(
            partial(_clear_places, small, axis)
        ):
            notes.append(f"{listed} would accept zeros in {name_places(small, axis)}")
    return tuple(notes)


def _judge_classes(criteria: Sequence[Criterion]) -> bool:
    # Scaled logits have the same classes. The author of a function decides if it depends on the scale.
    return any(one.measure is None or one.measure.is_of_classes for one in criteria)


def _are_of_direction(criteria: Sequence[Criterion]) -> bool:
    return all(one.measure is not None and one.measure.is_of_direction for one in criteria)


def _accept(
    name: str, criteria: Sequence[Criterion], plain: OutputComparison, wrong: Array, reference: Array, kind: str
) -> bool | None:
    """Return True if the criteria accept an output; None if they cannot be computed."""
    pair = Pair(wrong, reference, plain.tolerance, kind)
    try:
        if any(one.is_positional for one in criteria) and pair.stats.nonfinite:
            return False
        return all(_judge(name, one, pair, wrong, reference).passed for one in criteria)
    except CriterionFailed:
        return False
    except UsageError:
        return None


def _find_whole_axes(criteria: Sequence[Criterion], rank: int) -> set[int]:
    """Return the axes along which the criteria measure an output."""
    return {
        axis % rank
        for one in criteria
        if one.measure
        for axis in one.measure.find_axes(one.arguments)
        if -rank <= axis < rank
    }


def _mask_finite(array: Array) -> Any:
    """Return a mask for finite elements."""
    return np.isfinite(array) if array.dtype.kind in "fc" else np.isfinite(array.astype(np.float64))


def _negate(array: Array) -> Array:
    """Return the array with every sign flipped. Mirror unsigned integers within their range; invert bools."""
    if array.dtype.kind == "b":
        return np.logical_not(array)
    if get_dtype_name(array.dtype) in EXACT_DTYPES and get_dtype_name(array.dtype).startswith("uint"):
        return np.asarray(array.max() - array + array.min(), dtype=array.dtype)
    return np.negative(array)


def _zero(array: Array) -> Array:
    zeroed = array.copy()
    zeroed[_mask_finite(array)] = 0
    return zeroed


def _clear_places(places: Array, axis: int, array: Array) -> Array:
    """Return a copy with zeros at the given indices of an axis. Non-finite values stay unchanged."""
    cleared = array.copy()
    along = np.moveaxis(cleared, axis, 0)
    along[places] = _zero(along[places])
    return cleared


def _scale(array: Array) -> Array:
    """Return a copy with finite elements doubled, or halved if doubling would overflow the dtype."""
    usual, scaled = _mask_finite(array), array.copy()
    values = array[usual]
    if get_dtype_name(array.dtype) in EXACT_DTYPES:
        wide = values.astype(np.uint64 if array.dtype == np.uint64 else np.int64)
        limit = 0 if array.dtype.kind == "b" else int(get_int_limits(array.dtype).max) // 2
        is_small = bool((np.abs(wide) <= limit).all())
        scaled[usual] = wide * 2 if is_small else wide // 2
    else:
        is_small = find_largest(np.abs(values)) <= float(get_float_limits(get_part_dtype(array.dtype)).max) / 2
        scaled[usual] = values + values if is_small else values / 2
    return scaled


def _shuffle(array: Array, *, seed: int) -> Array:
    """Shuffle the finite elements reproducibly. Other elements stay in place."""
    kept = _mask_finite(array)
    wrong = array.copy()
    wrong[kept] = np.random.default_rng([_SEED, seed]).permutation(array[kept])
    return wrong


def _is_equal(one: Array, other: Array) -> bool:
    """Return True if two arrays contain the same values; NaN equals NaN."""
    with np.errstate(invalid="ignore"):
        return bool(np.all((one == other) | ((one != one) & (other != other))))
