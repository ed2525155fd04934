"""Find the cause of a wrong generation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hil.compare.generation.cache import BadTensor
from hil.compare.generation.logits import ERROR_FLOOR, LogitBounds, measure_errors, measure_scale, select_rows
from hil.compare.generation.results import FaultKind, Generated, GenerationFault, RowResult
from hil.core.tensors import Array


def find_stale(first: Generated, again: Generated) -> GenerationFault | None:
    """Find the first position that differs between two runs of the same prompt: in the logits, or else in the cache."""
    rows = {int(position): row for position, row in zip(again.positions, again.logits, strict=True)}
    for position, row in zip(first.positions, first.logits, strict=True):
        other = rows.get(int(position))
        if other is not None and row.tobytes() != other.tobytes():
            return make_fault(first, FaultKind.STALE, int(position), tensor="logits")
    for own, others in zip(first.cache, again.cache, strict=True):
        for position, (entry, other) in enumerate(zip(own.rows, others.rows, strict=False), own.first):
            if entry.tobytes() != other.tobytes():
                return make_fault(first, FaultKind.STALE, position, tensor=own.name)
    return None


def find_nonfinite(board: Generated, finite: Array) -> GenerationFault | None:
    """Find the first position with non-finite logits or cache entries. The fault names the previous layer."""
    found = [(int(board.positions[row]), math.inf, "logits") for row in np.flatnonzero(~finite)[:1]]
    for one in board.cache:
        bad = np.flatnonzero(~np.isfinite(np.asarray(one.rows, np.float64)).all(-1))
        found += [(one.first + int(row), one.layer, one.name) for row in bad[:1]]
    if not found:
        return None
    position, layer, tensor = min(found)
    blamed = max(layer - 1, 0) if layer != math.inf else -1
    return make_fault(board, FaultKind.NONFINITE, position, tensor=tensor, layer=int(blamed))


def find_wrong_token(board: Generated, actual: Array) -> GenerationFault | None:
    """Find the first chosen token that does not have the largest logit."""
    rows = {int(position): row for row, position in enumerate(board.positions)}
    for position, token in zip(board.places.chosen, board.tokens, strict=True):
        row = rows.get(position)
        if row is not None and int(np.argmax(actual[row])) != int(token):
            return make_fault(board, FaultKind.SAMPLER, position)
    return None


def find_inconsistency(board: Generated, reference: Generated, baseline: Generated) -> GenerationFault | None:
    """Find the first position where the model's steps and prompts disagree.

    The reference ran the tokens in steps. The baseline ran the same tokens as one prompt.
    """
    exact = select_rows(baseline, reference.positions)
    far = measure_errors(np.asarray(reference.logits, np.float64), exact)
    wrong = np.flatnonzero(far > ERROR_FLOOR * measure_scale(exact))
    return make_fault(board, FaultKind.MODEL, int(reference.positions[wrong[0]])) if wrong.size else None


def find_cause(
    board: Generated,
    wrong: Sequence[RowResult],
    wrong_prefill: Sequence[RowResult],
    bad: Sequence[BadTensor],
    *,
    has_prefill: bool,
) -> GenerationFault:
    """Determine the cause of wrong logits from the first wrong position and the cache entries."""
    position = min(row.position for row in (wrong or wrong_prefill))
    phase = _find_phase(board, wrong, wrong_prefill, bad) if has_prefill else ""
    if not board.cache:
        return make_fault(board, FaultKind.LOGITS, position, tensor="logits", phase=phase)
    if not bad:
        if phase == "prefill only":
            return make_fault(board, FaultKind.MASK, position, tensor="logits", phase=phase)
        return make_fault(board, FaultKind.HEAD, position, tensor="logits", phase=phase)
    first = min(one.rows[0] for one in bad)
    tensors = [one for one in bad if first in one.rows]
    tensor, layer = tensors[0].name, tensors[0].layer
    # A state has no positions, so only the logits show the first wrong position.
    start = min(position, first) if tensors[0].is_state else first
    # If position 0 is already wrong, the layer itself is inexact, for example because of a different arithmetic.
    if layer == 0 and (first == 0 or tensors[0].is_state):
        return make_fault(board, FaultKind.LAYER, start, tensor=tensor, layer=0, phase=phase)
    if layer == 0:
        only_keys = all(one.is_key for one in tensors if one.layer == 0)
        # If an entry is lost, the logits are still right at its position and wrong later. Without these logits, the
        # entry itself may be wrong.
        has_logits = not {first, first + 1}.isdisjoint(map(int, board.positions))
        if first < position and has_logits and not only_keys:
            return make_fault(board, FaultKind.SLOT, position, tensor=tensor, phase=phase)
        kind = FaultKind.POSITION if only_keys else FaultKind.SLOT
        return make_fault(board, kind, first, tensor=tensor, phase=phase)
    if layer == 1 and first <= 1 and _is_mask(board, bad):
        return make_fault(board, FaultKind.MASK, min(position, first), tensor=tensor, phase=phase)
    return make_fault(board, FaultKind.LAYER, start, tensor=tensor, layer=layer - 1, phase=phase)


def _find_phase(
    board: Generated, wrong: Sequence[RowResult], wrong_prefill: Sequence[RowResult], bad: Sequence[BadTensor]
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


def _is_mask(board: Generated, bad: Sequence[BadTensor]) -> bool:
    """Return True if a wrong mask in layer 0 explains the wrong cache entries of layer 1.

    If the mask hides the newest token, position 0 stays right, because it sees only itself. If the mask shows the next
    token, the last position of the prompt and all steps stay right, because they have no next token.
    """
    rows = {row for one in bad if one.layer == 1 for row in one.rows}
    return 0 not in rows or board.places.chosen[0] not in rows


def make_fault(
    board: Generated, kind: FaultKind, position: int, *, tensor: str = "", layer: int = -1, phase: str = ""
) -> GenerationFault:
    """Return a fault at a position, with the step that computed the position."""
    return GenerationFault(kind, position, board.places.step_of(position), tensor, layer, phase)


def describe_fault(fault: GenerationFault, board: Generated, rows: Sequence[RowResult], bound: LogitBounds) -> str:
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


def _describe_row(row: RowResult, bound: LogitBounds) -> str:
    kl = f"KL {row.kl:.2g} (bound {bound.kl:.2g})"
    return f"at position {row.position} {kl}, max abs {row.max_abs:.3g} (bound {bound.error:.3g})"
