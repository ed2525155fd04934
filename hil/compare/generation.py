"""Judge the logits, tokens and cache of a decoder position by position.

The board and the reference run the same tokens. A control, the same model in the hardware's arithmetic, defines the
permitted deviation. There is no absolute bound, because the KL divergence of a model depends on the sharpness of its
distributions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from hil.core.results import Outcome
from hil.core.steps import TokenPlaces
from hil.core.tensors import Array

# A board may deviate by this multiple of the control's deviation.
FACTOR = 10.0
# A different token with the largest logit is a near-tie if the reference's margin is at most this multiple of the
# control's error.
NEAR_TIE = 2.0
# The comparison's own rounding error: for KL in nats, for logits relative to the reference's largest logit.
_KL_FLOOR = 1e-12
_ERROR_FLOOR = 1e-6
_TOP = (5, 100)
# A token has no probability if its logit is this much below the largest logit: exp(-100) is 4e-44.
_NEGLIGIBLE = 100.0
# Maximum number of positions for detecting permuted cache entries.
_MAX_ORDERED = 1024
# Two scaled cache entries count as equal up to this difference.
_SAME_ENTRY = 0.05


class FaultKind(str, Enum):
    """Cause of a wrong generation."""

    NONFINITE = "overflow"
    STALE = "stale cache"
    SAMPLER = "sampler"
    SLOT = "slot"
    POSITION = "position"
    MASK = "mask"
    LAYER = "layer"
    HEAD = "head"
    FLIP = "flip"
    LOGITS = "logits"
    MODEL = "model"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class CacheRows:
    """Content of a cache tensor: one row per position.

    Attributes:
        rows: Array [positions, values].
        first: Position of the first row. A recurrent state has a single row, at the last position.
    """

    name: str
    layer: int
    is_key: bool
    rows: Array
    first: int = 0


@dataclass(frozen=True)
class Generated:
    """Result of a generation.

    Attributes:
        places: Positions of the tokens.
        positions: Position of each row of the logits [rows].
        logits: Array [rows, vocabulary].
        tokens: Tokens after the prompt and after each step of every turn.
        text: Token of each position of the given text; -1 for tokens that the board chose.
        prefill: Logits of all positions [positions, vocabulary], from a run with all tokens as the prompt; None if not
            measured.
    """

    places: TokenPlaces
    positions: Array
    logits: Array
    tokens: Array
    cache: tuple[CacheRows, ...] = ()
    prefill: Array | None = None
    text: Array = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True)
class Perplexity:
    """Negative log-likelihood of known tokens, in nats.

    Attributes:
        tokens: Number of predicted tokens.
        board_nats: Mean of -log p(token), with p from the logits of the previous position.
        error_nats: Standard error of the mean difference between board and reference; NaN for one token.
    """

    tokens: int
    board_nats: float
    reference_nats: float
    error_nats: float


@dataclass(frozen=True)
class RowResult:
    """Comparison of the logits of a position.

    Attributes:
        kl: KL divergence of the board's distribution from that of the reference, in nats.
        max_abs: Largest difference of a logit.
        margin: Difference of the two largest logits of the reference.
        expected: Token with the largest logit of the reference.
        actual: Token with the largest logit of the board.
    """

    position: int
    kl: float
    max_abs: float
    margin: float
    expected: int
    actual: int
    passed: bool


@dataclass(frozen=True)
class CacheErrors:
    """Comparison of a cache tensor.

    Attributes:
        errors: Largest error of each position's entry, divided by the permitted error [positions].
        first: Position of the first entry. For a state without positions, this is the last position.
    """

    name: str
    layer: int
    is_key: bool
    errors: Array
    first: int = 0


@dataclass(frozen=True)
class GenerationFault:
    """Fault and where it occurred. ``step`` is 0 in a prompt. ``layer`` is -1 if unknown or outside the layers."""

    kind: FaultKind
    position: int
    step: int
    tensor: str = ""
    layer: int = -1
    phase: str = ""  # "prefill only", "decode only" or ""

    def __str__(self) -> str:
        parts = [f"layer {self.layer}"] if self.layer >= 0 else []
        if self.kind is not FaultKind.LAYER:
            parts.insert(0, str(self.kind))
        parts.append(f"step {self.step}" if self.step else "in the prompt")
        parts.append(f"position {self.position}")
        if self.tensor:
            parts.append(self.tensor)
        if self.phase:
            parts.append(self.phase)
        return ", ".join(parts)


@dataclass(frozen=True)
class GenerationVerdict:
    """Verdict on a generation.

    Attributes:
        kl_bound: Permitted divergence of a position, in nats.
        error_bound: Permitted difference of a logit.
        top: k -> mean share of the reference's k largest logits that are also among the board's k largest.
        first_divergent: Number of the first chosen token that differs from the reference's token, from 0; None if all
            are equal.
        cache: Comparison of the cache tensors that have the same shape as in the reference.
    """

    outcome: Outcome
    reason: str
    rows: tuple[RowResult, ...]
    kl_bound: float
    error_bound: float
    fault: GenerationFault | None = None
    notes: tuple[str, ...] = ()
    top: Mapping[int, float] = field(default_factory=dict)
    first_divergent: int | None = None
    perplexity: Perplexity | None = None
    cache: tuple[CacheErrors, ...] = ()


@np.errstate(all="ignore")
def judge_generation(
    board: Generated, reference: Generated, control: Generated, baseline: Generated | None = None
) -> GenerationVerdict:
    """Compare a board's generation with a reference that ran the same tokens.

    Args:
        control: Result of the model in the hardware's arithmetic.
        baseline: Result of the model in the reference's arithmetic with the same calls as the control. Given if the
            control's calls differ from the board's: all tokens are then in the prompt.
    """
    calls, baseline = baseline, baseline or reference
    expected = _select_rows(reference, board.positions)
    actual, bound = np.asarray(board.logits, np.float64), _Bounds.compute(baseline, control)
    finite = np.asarray((np.isfinite(actual) | _is_equal(actual, expected)).all(-1))
    rows = _compare_rows(board.positions, actual, expected, bound)
    cache = _compare_cache(board.cache, reference.cache, baseline.cache, control.cache)
    bad = _find_bad_tensors(cache)
    prefill = None
    if board.prefill is not None:
        exact = _select_rows(baseline, range(len(board.prefill)))
        prefill = _compare_rows(np.arange(len(exact)), np.asarray(board.prefill, np.float64), exact, bound)
    notes: list[str] = []
    fault = _find_nonfinite(board, finite) or _find_wrong_token(board, actual)
    wrong = [row for row in rows if not row.passed]
    wrong_prefill = [row for row in prefill or () if not row.passed]
    if fault is None and (wrong or wrong_prefill):
        fault = _find_cause(board, wrong, wrong_prefill, bad, has_prefill=prefill is not None)
    if fault is None and bad:
        notes.append(_describe_cache(board, reference, bad))
    flips = [row for row in rows if row.expected != row.actual and row.passed]
    if fault is None and (far := [row for row in flips if not _is_near_tie(row, expected, board, bound)]):
        fault = _make_fault(board, FaultKind.FLIP, far[0].position)
    if fault is None and flips:
        notes.append(f"the largest logit differs at {len(flips)} of {len(rows)} positions, each time in a near-tie")
    differing = {row.position for row in rows if row.actual != row.expected}
    if fault is None and calls is not None:
        fault = _find_inconsistency(board, reference, calls)
    if fault is not None and fault.kind is FaultKind.MODEL:
        same = "steps and a prompt with the same tokens give different results"
        reason = f"the reference has the same fault: {same}: {fault}"
    else:
        shown = [*wrong, *wrong_prefill] or rows
        reason = "" if fault is None else f"{fault}: {_describe_fault(fault, board, shown, bound)}"
    return GenerationVerdict(
        outcome=Outcome.PASS if fault is None else Outcome.FAIL,
        reason=reason,
        rows=tuple(rows),
        kl_bound=bound.kl,
        error_bound=bound.error,
        fault=fault,
        notes=tuple(notes),
        top={k: share for k in (1, *_TOP) if (share := _compute_top_share(actual, expected, k)) is not None},
        first_divergent=next((n for n, position in enumerate(board.places.chosen) if position in differing), None),
        perplexity=_measure_perplexity(board, actual, expected),
        cache=cache,
    )


def find_stale(first: Generated, again: Generated) -> GenerationFault | None:
    """Find the first position that differs between two runs of the same prompt: in the logits, or else in the cache."""
    rows = {int(position): row for position, row in zip(again.positions, again.logits, strict=True)}
    for position, row in zip(first.positions, first.logits, strict=True):
        other = rows.get(int(position))
        if other is not None and row.tobytes() != other.tobytes():
            return _make_fault(first, FaultKind.STALE, int(position), tensor="logits")
    for own, others in zip(first.cache, again.cache, strict=True):
        for position, (entry, other) in enumerate(zip(own.rows, others.rows, strict=False), own.first):
            if entry.tobytes() != other.tobytes():
                return _make_fault(first, FaultKind.STALE, position, tensor=own.name)
    return None


def match_cache(cache: Sequence[CacheRows], reference: Sequence[CacheRows]) -> tuple[CacheRows, ...]:
    """Reorder cache tensors to match a reference from a different export. Return () if the entries are not comparable.

    The check compares the entries of layer 0 at the first position. They depend only on the token, so they must be
    about equal.
    """
    own = _number_tensors(cache)
    found = tuple(own[place] for place in _number_tensors(reference) if place in own)
    if not len(found) == len(cache) == len(reference):
        return ()
    for one, other in zip(found, reference, strict=True):
        if one.rows.shape[1:] != other.rows.shape[1:]:
            return ()
        actual, expected = (np.asarray(tensor.rows[:1], np.float64) for tensor in (one, other))
        is_far = (np.abs(actual - expected) > _SAME_ENTRY * np.abs(expected).max(initial=0.0)).any()
        if is_far and not one.layer and not one.first:
            return ()
    return found


def _number_tensors(cache: Iterable[CacheRows]) -> dict[tuple[int, bool, int], CacheRows]:
    """Return the tensors by (layer, is a key, number).

    The number counts tensors of the same kind: a layer may have two states.
    """
    found: dict[tuple[int, bool, int], CacheRows] = {}
    numbers: Counter[tuple[int, bool]] = Counter()
    for one in cache:
        place = (one.layer, one.is_key)
        found[(*place, numbers[place])] = one
        numbers[place] += 1
    return found


@dataclass(frozen=True)
class _Bounds:
    """Permitted deviations: ten times the control's deviations.

    The limits are below the deviations of a board that returns zeros.
    """

    kl: float
    error: float
    control_error: float

    @classmethod
    def compute(cls, reference: Generated, control: Generated) -> _Bounds:
        exact, rounded = np.asarray(reference.logits, np.float64), np.asarray(control.logits, np.float64)
        scale = _measure_scale(exact)
        kl = max(_find_largest(_compute_divergence(exact, rounded)), _KL_FLOOR)
        error = max(_find_largest(_measure_errors(rounded, exact)), _ERROR_FLOOR * scale)
        return cls(min(FACTOR * kl, math.log(exact.shape[-1])), min(FACTOR * error, scale / 2), error)


def _find_largest(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(known.max()) if known.size else 0.0


def _is_negligible(logits: Array) -> Array:
    """Return a mask of tokens without probability.

    Models mask unused tokens with minus infinity or a large negative number.
    """
    return np.asarray(logits < logits.max(-1, keepdims=True) - _NEGLIGIBLE)


def _is_equal(actual: Array, expected: Array) -> Array:
    return np.asarray((actual == expected) | (_is_negligible(actual) & _is_negligible(expected)))


def _measure_errors(actual: Array, expected: Array) -> Array:
    """Return the largest difference of each row's logits. Tokens without probability in both rows are ignored."""
    return np.asarray(np.where(_is_equal(actual, expected), 0.0, np.abs(actual - expected)).max(-1))


def _measure_scale(logits: Array) -> float:
    """Return the largest magnitude of a logit. Tokens without probability are ignored."""
    return _find_largest(np.where(_is_negligible(logits), 0.0, np.abs(logits)))


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def _compute_divergence(expected: Array, actual: Array) -> Array:
    """Return the KL divergence of each row, in nats: sum(p * (log p - log q)), where p is expected."""
    p, q = _log_softmax(expected), _log_softmax(actual)
    weights = np.exp(p)
    terms = np.where(weights == 0.0, 0.0, weights * (p - q))
    return np.asarray(np.maximum(terms.sum(-1), 0.0))


def _compare_rows(positions: Array, actual: Array, expected: Array, bound: _Bounds) -> list[RowResult]:
    kl, error = _compute_divergence(expected, actual), _measure_errors(actual, expected)
    top = np.partition(expected, -min(2, expected.shape[-1]), -1)[:, -2:]
    margins = top[:, -1] - top[:, 0]
    return [
        RowResult(
            int(positions[row]),
            float(kl[row]),
            float(error[row]),
            float(margins[row]),
            int(np.argmax(expected[row])),
            int(np.argmax(actual[row])),
            bool(kl[row] <= bound.kl and error[row] <= bound.error),
        )
        for row in range(len(positions))
    ]


def _select_rows(result: Generated, positions: Iterable[int]) -> Array:
    """Return the logits at these positions, as float64."""
    place = {int(position): row for row, position in enumerate(result.positions)}
    return np.asarray(result.logits, np.float64)[[place[int(position)] for position in positions]]


def _find_inconsistency(board: Generated, reference: Generated, baseline: Generated) -> GenerationFault | None:
    """Find the first position where the model's steps and prompts disagree.

    The reference ran the tokens in steps. The baseline ran the same tokens as one prompt.
    """
    exact = _select_rows(baseline, reference.positions)
    far = _measure_errors(np.asarray(reference.logits, np.float64), exact)
    wrong = np.flatnonzero(far > _ERROR_FLOOR * _measure_scale(exact))
    return _make_fault(board, FaultKind.MODEL, int(reference.positions[wrong[0]])) if wrong.size else None


def _make_fault(
    board: Generated, kind: FaultKind, position: int, *, tensor: str = "", layer: int = -1, phase: str = ""
) -> GenerationFault:
    return GenerationFault(kind, position, board.places.step_of(position), tensor, layer, phase)


def _find_nonfinite(board: Generated, finite: Array) -> GenerationFault | None:
    """Find the first position with non-finite logits or cache entries. The fault names the previous layer."""
    found = [(int(board.positions[row]), math.inf, "logits") for row in np.flatnonzero(~finite)[:1]]
    for one in board.cache:
        bad = np.flatnonzero(~np.isfinite(np.asarray(one.rows, np.float64)).all(-1))
        found += [(one.first + int(row), one.layer, one.name) for row in bad[:1]]
    if not found:
        return None
    position, layer, tensor = min(found)
    blamed = max(layer - 1, 0) if layer != math.inf else -1
    return _make_fault(board, FaultKind.NONFINITE, position, tensor=tensor, layer=int(blamed))


def _find_wrong_token(board: Generated, actual: Array) -> GenerationFault | None:
    """Find the first chosen token that does not have the largest logit."""
    rows = {int(position): row for row, position in enumerate(board.positions)}
    for position, token in zip(board.places.chosen, board.tokens, strict=True):
        row = rows.get(position)
        if row is not None and int(np.argmax(actual[row])) != int(token):
            return _make_fault(board, FaultKind.SAMPLER, position)
    return None


@dataclass(frozen=True)
class _BadTensor:
    """Cache tensor with entries that deviate more than ten times the control.

    Attributes:
        rows: Wrong positions, in order. A state has only the last position.
    """

    name: str
    layer: int
    is_key: bool
    is_state: bool
    rows: tuple[int, ...]


def _find_bad_tensors(cache: Iterable[CacheErrors]) -> list[_BadTensor]:
    """Find the tensors with wrong entries, ordered by layer; values are before keys."""
    found = [
        _BadTensor(one.name, one.layer, one.is_key, one.first > 0, tuple(map(int, one.first + wrong)))
        for one in cache
        if (wrong := np.flatnonzero(~(one.errors <= 1))).size
    ]
    return sorted(found, key=lambda one: (one.layer, one.is_key))


def _compare_cache(
    board: Sequence[CacheRows],
    reference: Sequence[CacheRows],
    baseline: Sequence[CacheRows],
    control: Sequence[CacheRows],
) -> tuple[CacheErrors, ...]:
    found = []
    for one, *others in zip(board, reference, baseline, control, strict=False):
        if one.rows.shape[1:] != others[0].rows.shape[1:]:
            continue
        count = min(len(tensor.rows) for tensor in (one, *others))
        actual, expected, exact, rounded = (np.asarray(tensor.rows[:count], np.float64) for tensor in (one, *others))
        error = np.abs(rounded - exact).max(-1, initial=0.0)
        scale = float(np.abs(expected).max(initial=0.0))
        limit = FACTOR * max(_find_largest(error), _ERROR_FLOOR * scale)
        far = np.abs(actual - expected).max(-1, initial=0.0)
        errors = np.where(far == limit, np.sign(far), far / limit)  # both may be 0 or infinite
        found.append(CacheErrors(one.name, one.layer, one.is_key, errors, one.first))
    return tuple(found)


def _find_cause(
    board: Generated,
    wrong: Sequence[RowResult],
    wrong_prefill: Sequence[RowResult],
    bad: Sequence[_BadTensor],
    *,
    has_prefill: bool,
) -> GenerationFault:
    """Determine the cause of wrong logits from the first wrong position and the cache entries."""
    position = min(row.position for row in (wrong or wrong_prefill))
    phase = _find_phase(board, wrong, wrong_prefill, bad) if has_prefill else ""
    if not board.cache:
        return _make_fault(board, FaultKind.LOGITS, position, tensor="logits", phase=phase)
    if not bad:
        if phase == "prefill only":
            return _make_fault(board, FaultKind.MASK, position, tensor="logits", phase=phase)
        return _make_fault(board, FaultKind.HEAD, position, tensor="logits", phase=phase)
    first = min(one.rows[0] for one in bad)
    tensors = [one for one in bad if first in one.rows]
    tensor, layer = tensors[0].name, tensors[0].layer
    # A state has no positions, so only the logits show the first wrong position.
    start = min(position, first) if tensors[0].is_state else first
    # If position 0 is already wrong, the layer itself is inexact, for example because of a different arithmetic.
    if layer == 0 and (first == 0 or tensors[0].is_state):
        return _make_fault(board, FaultKind.LAYER, start, tensor=tensor, layer=0, phase=phase)
    if layer == 0:
        only_keys = all(one.is_key for one in tensors if one.layer == 0)
        # If an entry is lost, the logits are still right at its position and wrong later. Without these logits, the
        # entry itself may be wrong.
        has_logits = not {first, first + 1}.isdisjoint(map(int, board.positions))
        if first < position and has_logits and not only_keys:
            return _make_fault(board, FaultKind.SLOT, position, tensor=tensor, phase=phase)
        kind = FaultKind.POSITION if only_keys else FaultKind.SLOT
        return _make_fault(board, kind, first, tensor=tensor, phase=phase)
    if layer == 1 and first <= 1 and _is_mask(board, bad):
        return _make_fault(board, FaultKind.MASK, min(position, first), tensor=tensor, phase=phase)
    return _make_fault(board, FaultKind.LAYER, start, tensor=tensor, layer=layer - 1, phase=phase)


def _find_phase(
    board: Generated, wrong: Sequence[RowResult], wrong_prefill: Sequence[RowResult], bad: Sequence[_BadTensor]
) -> str:
    """Return which calls are wrong: "prefill only", "decode only", or "" for both.

    If the prompt stored wrong cache entries, correct steps also return wrong logits. Their own cache entries in the
    first wrong layer are then right.
    """
    entries = [one for one in bad if not one.is_state]
    own = [row for one in entries if one.layer == entries[0].layer for row in one.rows]
    steps_are_wrong = not {*(own or (row.position for row in wrong))}.isdisjoint(board.places.steps)
    if wrong_prefill and not steps_are_wrong:
        return "prefill only"
    is_decode = steps_are_wrong and not wrong_prefill and wrong[0].position in board.places.steps
    return "decode only" if is_decode else ""


def _is_mask(board: Generated, bad: Sequence[_BadTensor]) -> bool:
    """Return True if a wrong mask in layer 0 explains the wrong cache entries of layer 1.

    If the mask hides the newest token, position 0 stays right, because it sees only itself. If the mask shows the next
    token, the last position of the prompt and all steps stay right, because they have no next token.
    """
    rows = {row for one in bad if one.layer == 1 for row in one.rows}
    return 0 not in rows or board.places.chosen[0] not in rows


def _describe_cache(board: Generated, reference: Generated, bad: Sequence[_BadTensor]) -> str:
    """Describe wrong cache entries of a run with right logits: the order differs, or no step used the entries."""
    first = min(one.rows[0] for one in bad)
    if _is_permuted(_join(board.cache), _join(reference.cache)):
        return f"cache entries from position {first} on have a different order than in the reference"
    return f"cache entries from position {first} on differ from the reference, without effect on the logits"


def _join(cache: Sequence[CacheRows]) -> Array:
    """Concatenate all entries of each position, after scaling each tensor to a maximum of 1."""
    cache = [one for one in cache if not one.first]
    if not cache:
        return np.empty((0, 0))
    count = min(len(one.rows) for one in cache)
    rows = [np.asarray(one.rows[:count], np.float64) for one in cache]
    return np.concatenate([one / max(float(np.abs(one).max(initial=0.0)), 1e-30) for one in rows], -1)


def _is_permuted(actual: Array, expected: Array) -> bool:
    if actual.shape != expected.shape or not 0 < len(actual) <= _MAX_ORDERED:
        return False
    near = np.array([np.abs(expected - row).max(-1).argmin() for row in actual])
    is_whole = len(set(near.tolist())) == len(actual) and (near != np.arange(len(near))).any()
    return bool(is_whole and np.abs(actual - expected[near]).max(initial=0.0) <= _SAME_ENTRY)


def _is_near_tie(row: RowResult, expected: Array, board: Generated, bound: _Bounds) -> bool:
    at = int(np.flatnonzero(board.positions == row.position)[0])
    return bool(expected[at][row.expected] - expected[at][row.actual] <= NEAR_TIE * bound.control_error)


def _describe_fault(fault: GenerationFault, board: Generated, rows: Sequence[RowResult], bound: _Bounds) -> str:
    """Describe the logits at the fault's position, or the worst row if no row has this position."""
    at = next((row for row in rows if row.position == fault.position), None)
    if at is not None and fault.kind is FaultKind.SAMPLER:
        token = board.tokens[board.places.chosen.index(fault.position)]
        return f"the board chose token {token}, but token {at.actual} has the largest logit"
    if at is not None and fault.kind is FaultKind.FLIP:
        return f"token {at.actual} has the largest logit, expected token {at.expected} (margin {at.margin:.3g})"
    if at is None:
        at = max(rows, key=lambda row: math.inf if math.isnan(row.kl) else row.kl)
    return _describe_row(at, bound)


def _describe_row(row: RowResult, bound: _Bounds) -> str:
    kl = f"KL {row.kl:.2g} (bound {bound.kl:.2g})"
    return f"at position {row.position} {kl}, max abs {row.max_abs:.3g} (bound {bound.error:.3g})"


def _measure_perplexity(board: Generated, actual: Array, expected: Array) -> Perplexity | None:
    """Return the perplexity of the known tokens that follow a row of logits; None without such tokens."""
    following = [int(position) + 1 for position in board.positions]
    known = [row for row, after in enumerate(following) if after < len(board.text) and board.text[after] >= 0]
    if not known:
        return None
    tokens = board.text[[following[row] for row in known]]
    own, exact = (-_log_softmax(array[known])[np.arange(len(known)), tokens] for array in (actual, expected))
    error = float(np.std(own - exact, ddof=1) / math.sqrt(len(known))) if len(known) > 1 else math.nan
    return Perplexity(len(known), float(own.mean()), float(exact.mean()), error)


def _compute_top_share(actual: Array, expected: Array, k: int) -> float | None:
    """Return the mean overlap of the k largest logits of board and reference, 0 to 1; None for small vocabularies."""
    if k >= actual.shape[-1] or np.isnan(actual).any():
        return None
    if k == 1:  # for equal logits take the lowest token, like the other results
        return float(np.mean(np.argmax(actual, -1) == np.argmax(expected, -1)))
    own, other = (np.argpartition(-array, k - 1, -1)[:, :k] for array in (actual, expected))
    return float(np.mean([len(set(a) & set(b)) / k for a, b in zip(own.tolist(), other.tolist(), strict=True)]))
