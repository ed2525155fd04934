"""Judge the logits, tokens and cache of a decoder position by position.

The board and the reference run the same tokens. A control, the same model in the hardware's arithmetic, defines the
permitted deviation. There is no absolute bound, because the KL divergence of a model depends on the sharpness of its
distributions.
"""

from __future__ import annotations

import numpy as np

from hil.compare.generation.cache import compare_cache, describe_cache, find_bad_tensors
from hil.compare.generation.faults import (
    describe_fault,
    find_cause,
    find_inconsistency,
    find_nonfinite,
    find_wrong_token,
    make_fault,
)
from hil.compare.generation.logits import (
    LogitBounds,
    compare_rows,
    compute_top_share,
    is_equal,
    is_near_tie,
    measure_perplexity,
    select_rows,
)
from hil.compare.generation.results import FaultKind, Generated, GenerationVerdict
from hil.core.results import Outcome

_TOP = (5, 100)


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
    expected = select_rows(reference, board.positions)
    actual, bound = np.asarray(board.logits, np.float64), LogitBounds.compute(baseline, control)
    finite = np.asarray((np.isfinite(actual) | is_equal(actual, expected)).all(-1))
    rows = compare_rows(board.positions, actual, expected, bound)
    cache = compare_cache(board.cache, reference.cache, baseline.cache, control.cache)
    bad = find_bad_tensors(cache)
    prefill = None
    if board.prefill is not None:
        exact = select_rows(baseline, range(len(board.prefill)))
        prefill = compare_rows(np.arange(len(exact)), np.asarray(board.prefill, np.float64), exact, bound)
    notes: list[str] = []
    fault = find_nonfinite(board, finite) or find_wrong_token(board, actual)
    wrong = [row for row in rows if not row.passed]
    wrong_prefill = [row for row in prefill or () if not row.passed]
    if fault is None and (wrong or wrong_prefill):
        fault = find_cause(board, wrong, wrong_prefill, bad, has_prefill=prefill is not None)
    if fault is None and bad:
        notes.append(describe_cache(board, reference, bad))
    flips = [row for row in rows if row.expected != row.actual and row.passed]
    if fault is None and (far := [row for row in flips if not is_near_tie(row, expected, board, bound)]):
        fault = make_fault(board, FaultKind.FLIP, far[0].position)
    if fault is None and flips:
        notes.append(f"the largest logit differs at {len(flips)} of {len(rows)} positions, each time in a near-tie")
    differing = {row.position for row in rows if row.actual != row.expected}
    if fault is None and calls is not None:
        fault = find_inconsistency(board, reference, calls)
    if fault is not None and fault.kind is FaultKind.MODEL:
        same = "steps and a prompt with the same tokens give different results"
        reason = f"the reference has the same fault: {same}: {fault}"
    else:
        shown = [*wrong, *wrong_prefill] or rows
        reason = "" if fault is None else f"{fault}: {describe_fault(fault, board, shown, bound)}"
    return GenerationVerdict(
        outcome=Outcome.PASS if fault is None else Outcome.FAIL,
        reason=reason,
        rows=tuple(rows),
        kl_bound=bound.kl,
        error_bound=bound.error,
        fault=fault,
        notes=tuple(notes),
        top={k: share for k in (1, *_TOP) if (share := compute_top_share(actual, expected, k)) is not None},
        first_divergent=next((n for n, position in enumerate(board.places.chosen) if position in differing), None),
        perplexity=measure_perplexity(board, actual, expected),
        cache=cache,
    )
