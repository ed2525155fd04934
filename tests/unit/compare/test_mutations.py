"""Mistakes put into the comparer on purpose: with any of them in it, the comparer's own tests fail.

A comparer that is too kind passes wrong answers in silence, so its tests are tested too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import mutants

pytestmark = pytest.mark.slow

TESTS = [str(Path(__file__).with_name(name)) for name in ("test_compare.py", "test_tolerance.py", "test_small.py")]


class Mutant(NamedTuple):
    """How the comparer is weakened: what that is, the tests that notice, the module, one text in place of another."""

    weakness: str
    noticed_by: str
    module: str
    changes: tuple[tuple[str, str], ...]


def mutant(weakness: str, noticed_by: str, module: str, *changes: tuple[str, str]) -> Mutant:
    return Mutant(weakness, noticed_by, module, changes)


def stats(weakness: str, noticed_by: str, text: str, instead: str) -> Mutant:
    return mutant(weakness, noticed_by, "stats", (text, instead))


def tolerance(weakness: str, noticed_by: str, text: str, instead: str) -> Mutant:
    return mutant(weakness, noticed_by, "tolerance", (text, instead))


MUTANTS = [
    # What is compared at all.
    mutant(
        "shapes may differ",
        "test_another_shape_fails",
        "reasons",
        ("if actual.shape != reference.shape:", "if False:"),
    ),
    mutant(
        "dtypes may differ",
        "test_another_dtype_fails",
        "reasons",
        ("    if dtype == reference_dtype:", "    if True:"),
    ),
    mutant(
        "only the first output is looked at",
        "test_one_failing_output_fails_the_run",
        "verdict",
        ("for name, array, wanted in pairs\n", "for name, array, wanted in pairs[:1]\n"),
    ),
    mutant(
        "a missing output is nothing",
        "test_a_missing_or_an_extra_output",
        "verdict",
        ("if len(mine) != len(theirs):", "if len(mine) > len(theirs):"),
        ("theirs.items(), strict=True)", "theirs.items(), strict=False)"),
    ),
    mutant(
        "an extra output is nothing",
        "test_a_missing_or_an_extra_output",
        "verdict",
        ("if len(mine) != len(theirs):", "if len(mine) < len(theirs):"),
        ("theirs.items(), strict=True)", "theirs.items(), strict=False)"),
    ),
    mutant("a run without outputs passes", "test_a_run_without_outputs", "verdict", ("if not mine:", "if False:")),
    mutant(
        "names of outputs do not count",
        "test_outputs_are_paired_by_name",
        "verdict",
        ("if mine.keys() == theirs.keys():", "if False:"),
    ),
    mutant(
        "empty outputs pass in silence",
        "test_a_pass_of_nothing_but_empty_outputs",
        "verdict",
        ("_NOTHING if empty else ", ""),
    ),
    stats(
        "the last, partial chunk is skipped",
        "test_no_element_is_left_out",
        "range(equal, size, chunk)",
        "range(equal, size - chunk + 1, chunk)",
    ),
    stats("equal at first is equal", "test_no_element_is_left_out", "if equal < size:", "if equal == 0 < size:"),
    stats(
        "only mismatches of the last chunk count",
        "test_no_element_is_left_out",
        "self.mismatches += count",
        "self.mismatches = count",
    ),
    stats(
        "strings after the first chunk are skipped",
        "test_strings_are_compared_to_the_last_chunk",
        "for start in range(0, size, chunk):\n        a, b",
        "for start in range(0, min(size, chunk), chunk):\n        a, b",
    ),
    mutant(
        "strided tensors are read as they lie in memory",
        "test_layout_byte_order_and_memory_maps",
        "values",
        ("plain.flat\n", 'plain.ravel(order="K")\n'),
    ),
    # Zeros, NaN, infinities.
    mutant("zeros are as good as anything", "test_zeros_fail", "reasons", ("if stats.zeroed:", "if False:")),
    stats(
        "NaN agrees with everything",
        "test_nan_and_infinities",
        "np.isnan(x) & np.isnan(y)",
        "np.isnan(x) | np.isnan(y)",
    ),
    stats(
        "infinities agree with everything",
        "test_nan_and_infinities",
        "np.equal(x, y) |",
        "np.isinf(x) | np.isinf(y) |",
    ),
    stats(
        "the sign of an infinity does not count",
        "test_nan_and_infinities",
        "np.equal(x, y) |",
        "np.equal(np.abs(x), np.abs(y)) |",
    ),
    stats(
        "what is not finite is left out",
        "test_nan_and_infinities",
        "wrong = self._disagreeing(x, y, ok)",
        "wrong = None",
    ),
    # The bound.
    stats(
        "rtol and atol are swapped",
        "test_the_tolerance_is",
        "rtol, atol = self.tolerance.rtol, self.tolerance.atol",
        "atol, rtol = self.tolerance.rtol, self.tolerance.atol",
    ),
    stats(
        "rtol is a share of the board's value",
        "test_the_tolerance_is",
        "*self._magnitudes(d, y), wrong",
        "*self._magnitudes(d, x), wrong",
    ),
    stats(
        "rtol is a share of the largest reference",
        "test_the_tolerance_is",
        "np.multiply(y, rtol, out=y)",
        "np.full_like(y, rtol * y.max())",
    ),
    stats(
        "only values that are too large count",
        "test_the_tolerance_is",
        "return np.abs(d, out=d), np.abs(y, out=y)",
        "return d, np.abs(y, out=y)",
    ),
    stats(
        "a difference beside a reference of 0 hides behind rtol",
        "test_small_difference_beside_a_zero",
        "return largest, above",
        "return largest, relative",
    ),
    stats(
        "the short cut takes atol + rtol for the bound",
        "test_the_tolerance_is",
        "(largest <= atol or",
        "(largest <= atol + rtol or",
    ),
    stats(
        "imaginary parts do not count",
        "test_a_complex_difference_is_a_modulus",
        "np.hypot(d[0::2], d[1::2])",
        "np.abs(d[0::2])",
    ),
    mutant(
        "defaults are ten times as wide",
        "test_every_float_has_a_default",
        "tolerance",
        ("Tolerance(default.rtol if rtol is None", "Tolerance(10 * default.rtol if rtol is None"),
        ("default.atol if atol is None", "10 * default.atol if atol is None"),
    ),
    mutant(
        "integers may be one off",
        "test_integers_are_exact",
        "tolerance",
        ("dtype in EXACT_DTYPES and rtol is None and atol is None", 'dtype == "bool"'),
        (".get(dtype, Tolerance(0.0, 0.0))", ".get(dtype, Tolerance(0.0, 1.0))"),
    ),
    # How numbers are held.
    stats("64-bit integers are rounded", "test_integers_are_exact", 'if self.kind == "integer":', "if False:"),
    stats(
        "everything is rounded to float32",
        "test_integers_are_exact",
        "np.empty(reals) for _ in range(3)",
        "np.empty(reals, np.float32) for _ in range(3)",
    ),
    stats(
        "dtypes of less than a byte are not looked at",
        "test_one_wrong_element_fails",
        "reader(actual), reader(reference)",
        'reader(actual), reader(actual if "int4" in dtype_name(actual.dtype) else reference)',
    ),
    stats(
        "bools agree with one another",
        "test_one_wrong_element_fails",
        "        x[...] = self._reals(a)\n",
        "        x[...] = self._reals(b if a.dtype == bool else a)\n",
    ),
    # Tolerances that cannot fail.
    mutant(
        "rtol may be 1 or more",
        "test_a_tolerance_that_makes_no_sense",
        "tolerance",
        ("rtol is not None and rtol >= 1", "rtol is not None and rtol >= 100"),
    ),
    mutant(
        "NaN is a tolerance",
        "test_a_tolerance_that_makes_no_sense",
        "tolerance",
        ("not (math.isfinite(value) and value >= 0)", "value < 0"),
    ),
    mutant(
        "atol may be as wide as the dtype",
        "test_atol_as_wide_as_the_dtype",
        "tolerance",
        ("atol is not None and atol >= span", "False"),
    ),
    tolerance(
        "a given atol may hide a flipped sign",
        "test_a_tolerance_that_zeros_or_another_order",
        "if tolerance is None or (rtol is None and atol is None):",
        "if True:",
    ),
    tolerance("zeros may agree", "test_a_tolerance_that_zeros", "if (1 - rtol) * largest <= atol:", "if False:"),
    tolerance(
        "any order may agree",
        "test_a_tolerance_that_zeros",
        "if constant < spread <= steps * (atol + rtol * scale.least_extreme):",
        "if False:",
    ),
    # What cannot be judged.
    tolerance("the default atol is for values of 1", "test_the_default_atol_is", "min(scale.rms, 1.0)", "1.0 + 0.0"),
    tolerance("the default atol grows without end", "test_the_default_atol_is", "min(scale.rms, 1.0)", "scale.rms"),
    tolerance(
        "zeros make a tensor small",
        "test_the_default_atol_is",
        "count += int(np.count_nonzero(magnitudes))",
        "count += magnitudes.size",
    ),
    tolerance(
        "a mask makes small values large", "test_a_mask_does_not", "magnitudes < limit\n", "magnitudes < np.inf\n"
    ),
    mutant(
        "noise is not allowed for",
        "test_measured_noise",
        "stats",
        ("limit += self.allowed(start, start + d.size)", "limit += 0"),
    ),
    mutant(
        "noise widens without a ceiling",
        "test_where_too_many_elements_jump",
        "allowance",
        ("return sizes if self.is_rare else", "return sizes if True else"),
    ),
    mutant(
        "a jump counts as noise of all",
        "test_noise_above_its_ceiling",
        "allowance",
        ("where=~above", "where=above | ~above"),
    ),
    mutant(
        "what only noise explains passes",
        "test_an_answer_within_the_references_own_noise",
        "judging",
        ("if stats.mismatches:\n        return found", "if True:\n        return found"),
    ),
    mutant(
        "small values are not looked at",
        "test_small_column_beside_large_ones",
        "judging",
        ("(stats.max_rel > limit or stats.beside_zero)", "False"),
    ),
    mutant(
        "columns of small values are not looked at",
        "test_small_rows_of_the_second_axis",
        "small",
        ("for axis in (*_axes(reference.shape), None):", "for axis in (None,):"),
    ),
    mutant(
        "few small values make an output blind",
        "test_few_small_values_and_zeros",
        "small",
        ("many = smalls >= (_SHARE if axis is None else _GROUP_SHARE) * nonzero", "many = smalls > 0"),
    ),
    mutant(
        "noise hides small values",
        "test_small_column_within_its_own_noise",
        "small",
        ("many & (hidden >= _GROUP_SHARE * nonzero) & (hidden > 0)", "many & False"),
    ),
    mutant(
        "any zero counts as flushed",
        "test_flushed_subnormals",
        "caveats",
        ("(sizes > 0) & (sizes < smallest)", "(sizes > 0)"),
    ),
    tolerance(
        "a default tolerance may be as wide as the values",
        "test_values_of_a_few_steps",
        "if largest <= steps * atol:",
        "if False:",
    ),
    mutant(
        "an answer within noise passes",
        "test_an_answer_within_the_references_own_noise",
        "verdict",
        ("not reason and (may_be_blind or not doubt)", "not reason"),
    ),
    mutant(
        "noise makes worse what agrees without it",
        "test_noise_never_makes_worse",
        "verdict",
        ("if atol is not None or (plain.passed and not plain.blind):", "if atol is not None:"),
    ),
    mutant(
        "zeros are wrong where the reference is noise",
        "test_zeros_are_no_wrong_answer",
        "judging",
        ("if not allowed or (found.stats and found.stats.nonfinite):", "if not allowed or found.stats.zeroed:"),
    ),
    mutant(
        "who may be blind may be wrong",
        "test_an_output_may_be_blind_by_name",
        "verdict",
        ("not reason and (may_be_blind or not doubt)", "may_be_blind or not (reason or doubt)"),
    ),
    mutant(
        "more error than signal passes",
        "test_more_error_than_signal",
        "judging",
        ("stats.sqnr_db is not None and stats.sqnr_db < 0", "False"),
    ),
    mutant(
        "one blind output makes a wrong one blind",
        "test_a_verdict_is_wrong_before_it_is_blind",
        "verdict",
        ("for outcome in (Outcome.FAIL, Outcome.BLIND)", "for outcome in (Outcome.BLIND, Outcome.FAIL)"),
    ),
    mutant(
        "a reference that cannot judge says PASS",
        "test_a_reference_that_cannot_judge",
        "verdict",
        ('return Outcome.BLIND, f"{blind[0].reason}', 'return Outcome.PASS, f"{blind[0].reason}'),
    ),
    # What is told of the difference.
    stats("cosines rise above 1", "test_cosine_is_never_above_one", "min(1.0, max(-1.0, cosine))", "cosine"),
    mutant(
        "sums are of float32",
        "test_no_element_is_left_out",
        "values",
        ("total = np.dot(x[whole:], y[whole:])", "total = np.float32(np.dot(x[whole:], y[whole:]))"),
    ),
    mutant(
        "ULP does not know of signs",
        "test_ulp_counts_representable_values",
        "stats",
        ("crossing = highest >= top", "crossing = False"),
    ),
    mutant(
        "ULP of two signs wraps around",
        "test_ulp_counts_representable_values",
        "stats",
        ("np.add(a, b, out=scratch)", "np.subtract(a, b, out=scratch)"),
    ),
    # Masks and saturated values.
    stats("masks are in the sums", "test_a_mask_hides", "if self._may_have_masks(y, sums[2]):", "if False:"),
    stats(
        "masks that are equal are in the sums",
        "test_masks_are_found",
        "if self._may_have_masks(y, energy):",
        "if False:",
    ),
    stats(
        "a mask in the reference alone is left out",
        "test_a_mask_in_one_tensor_only",
        "(np.abs(x) >= low_x) & ",
        "",
    ),
    stats(
        "a mask in the board's answer alone is left out",
        "test_a_mask_in_one_tensor_only",
        " & (np.abs(y) >= low_y)",
        "",
    ),
    stats(
        "a mask agrees with one of another sign",
        "test_a_mask_in_one_tensor_only",
        " & (np.signbit(x) == np.signbit(y))",
        "",
    ),
    stats(
        "where there are only masks all is well",
        "test_masks_are_compared_element_by_element",
        "(self.finite if one.masks else self.visible)",
        "self.finite",
    ),
    # Several references.
    mutant(
        "references that disagree are not mentioned",
        "test_where_the_references_disagree or test_a_board_between_two_references",
        "verdict",
        ("    disputes = [", "    disputes: list[str] = [] and ["),
    ),
    mutant(
        "one reference of several is enough",
        "test_a_board_at_the_edge_of_two_agreeing_references",
        "verdict",
        ("    if not failed:\n        agreed", "    if agreeing:\n        agreed"),
    ),
    mutant(
        "any answer is near the plain model's",
        "test_an_answer_is_too_far",
        "verdict",
        ("not output.sqnr_db >= min_sqnr_db", "False"),
    ),
    mutant(
        "what cannot be compared is near the plain model's",
        "test_an_answer_is_too_far",
        "verdict",
        ("if (output.sqnr_db is None or output.nonfinite) and not output.passed:", "if False:"),
    ),
]


def ends(chosen: list[Mutant]) -> list[dict[str, Any]]:
    """What becomes of the comparer's tests under each mutant."""
    order = {
        "tests": TESTS,
        "warm": ["numpy", "ml_dtypes", "hypothesis", "hypothesis.strategies", "hil.core.tensors", "hil.core.results"],
        "mutants": [
            {"module": f"hil.compare.{one.module}", "changes": one.changes, "select": one.noticed_by} for one in chosen
        ],
    }
    done = subprocess.run(
        [sys.executable, mutants.__file__], input=json.dumps(order), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(chosen), done.stderr
    return found


def test_every_way_to_weaken_the_comparer_is_noticed_by_its_tests() -> None:
    for one, end in zip(MUTANTS, ends(MUTANTS), strict=True):
        # A mutant that cannot even be imported, or that selects no test, proves nothing.
        assert end["exit_code"] == pytest.ExitCode.TESTS_FAILED, f"{one.weakness}: {end}"
        assert end["message"].startswith(("assert ", "AssertionError", "Failed: DID NOT RAISE")), (one.weakness, end)


def test_the_same_tests_pass_where_nothing_was_put_in() -> None:
    every = " or ".join({one.noticed_by for one in MUTANTS})
    [end] = ends([mutant("nothing", every, "verdict")])
    assert end["exit_code"] == pytest.ExitCode.OK and end["passed"] > 500, end


def test_a_mutant_whose_text_is_not_there_is_refused() -> None:
    [end] = ends([mutant("something", "test_cosine", "verdict", ("no such text", ""))])
    assert end["exit_code"] is None and "0 times" in end["message"]
