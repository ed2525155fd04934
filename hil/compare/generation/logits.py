"""Compare the logits of a board with those of a reference, row by row."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hil.compare.generation.results import Generated, Perplexity, RowResult
from hil.core.tensors import Array

# A board may deviate by this multiple of the control's deviation.
FACTOR = 10.0
# A different token with the largest logit is a near-tie if the reference's margin is at most this multiple of the
# control's error.
NEAR_TIE = 2.0
# The comparison's own rounding error: for KL in nats, for logits relative to the reference's largest logit.
_KL_FLOOR = 1e-12
ERROR_FLOOR = 1e-6
# A token has no probability if its logit is this much below the largest logit: exp(-100) is 4e-44.
_NEGLIGIBLE = 100.0


@dataclass(frozen=True)
class LogitBounds:
    """Permitted deviations: ten times the control's deviations.

    The limits are below the deviations of a board that returns zeros.
    """

    kl: float
    error: float
    control_error: float

    @classmethod
    def compute(cls, reference: Generated, control: Generated) -> LogitBounds:
        """Return the bounds for a control that ran the same tokens as the reference."""
        exact, rounded = np.asarray(reference.logits, np.float64), np.asarray(control.logits, np.float64)
        scale = measure_scale(exact)
        kl = max(find_largest(_compute_divergence(exact, rounded)), _KL_FLOOR)
        error = max(find_largest(measure_errors(rounded, exact)), ERROR_FLOOR * scale)
        return cls(min(FACTOR * kl, math.log(exact.shape[-1])), min(FACTOR * error, scale / 2), error)


def compare_rows(positions: Array, actual: Array, expected: Array, bound: LogitBounds) -> list[RowResult]:
    """Compare the logits of each position, and judge them by the bounds."""
    kl, error = _compute_divergence(expected, actual), measure_errors(actual, expected)
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


def select_rows(result: Generated, positions: Iterable[int]) -> Array:
    """Return the logits at these positions, as float64."""
    place = {int(position): row for row, position in enumerate(result.positions)}
    return np.asarray(result.logits, np.float64)[[place[int(position)] for position in positions]]


def is_near_tie(row: RowResult, expected: Array, board: Generated, bound: LogitBounds) -> bool:
    """Return whether the reference's logits of both tokens differ at most by twice the control's error."""
    at = int(np.flatnonzero(board.positions == row.position)[0])
    return bool(expected[at][row.expected] - expected[at][row.actual] <= NEAR_TIE * bound.control_error)


def measure_perplexity(board: Generated, actual: Array, expected: Array) -> Perplexity | None:
    """Return the perplexity of the known tokens that follow a row of logits; None without such tokens."""
    following = [int(position) + 1 for position in board.positions]
    known = [row for row, after in enumerate(following) if after < len(board.text) and board.text[after] >= 0]
    if not known:
        return None
    tokens = board.text[[following[row] for row in known]]
    own, exact = (-_log_softmax(array[known])[np.arange(len(known)), tokens] for array in (actual, expected))
    error = float(np.std(own - exact, ddof=1) / math.sqrt(len(known))) if len(known) > 1 else math.nan
    return Perplexity(len(known), float(own.mean()), float(exact.mean()), error)


def compute_top_share(actual: Array, expected: Array, k: int) -> float | None:
    """Return the mean overlap of the k largest logits of board and reference, 0 to 1; None for small vocabularies."""
    if k >= actual.shape[-1] or np.isnan(actual).any():
        return None
    if k == 1:  # for equal logits take the lowest token, like the other results
        return float(np.mean(np.argmax(actual, -1) == np.argmax(expected, -1)))
    own, other = (np.argpartition(-array, k - 1, -1)[:, :k] for array in (actual, expected))
    return float(np.mean([len(set(a) & set(b)) / k for a, b in zip(own.tolist(), other.tolist(), strict=True)]))


def _compute_divergence(expected: Array, actual: Array) -> Array:
    """Return the KL divergence of each row, in nats: sum(p * (log p - log q)), where p is expected."""
    p, q = _log_softmax(expected), _log_softmax(actual)
    weights = np.exp(p)
    terms = np.where(weights == 0.0, 0.0, weights * (p - q))
    return np.asarray(np.maximum(terms.sum(-1), 0.0))


def measure_errors(actual: Array, expected: Array) -> Array:
    """Return the largest difference of each row's logits. Tokens without probability in both rows are ignored."""
    return np.asarray(np.where(is_equal(actual, expected), 0.0, np.abs(actual - expected)).max(-1))


def measure_scale(logits: Array) -> float:
    """Return the largest magnitude of a logit. Tokens without probability are ignored."""
    return find_largest(np.where(_is_negligible(logits), 0.0, np.abs(logits)))


def find_largest(values: Array) -> float:
    """Return the largest finite value, or 0 without finite values."""
    known = values[np.isfinite(values)]
    return float(known.max()) if known.size else 0.0


def is_equal(actual: Array, expected: Array) -> Array:
    """Return a mask of logits that are equal, or without probability in both arrays."""
    return np.asarray((actual == expected) | (_is_negligible(actual) & _is_negligible(expected)))


def _is_negligible(logits: Array) -> Array:
    """Return a mask of tokens without probability.

    Models mask unused tokens with minus infinity or a large negative number.
    """
    return np.asarray(logits < logits.max(-1, keepdims=True) - _NEGLIGIBLE)


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
