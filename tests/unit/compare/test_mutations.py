"""Mutation tests: with any of these bugs in the comparer, its tests fail.

A comparer that is too lenient passes wrong outputs without notice, so its tests are tested too.
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
    """A bug in the comparer: description, the tests that detect it, the module, and the text replacements."""

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
    # Outputs, shapes and dtypes.
    mutant(
        "shapes may differ",
        "test_compare_fails_shape_mismatch",
        "reasons",
        ("if actual.shape != reference.shape:", "if False:"),
    ),
    mutant(
        "dtypes may differ",
        "test_compare_fails_dtype_mismatch",
        "reasons",
        ("    if dtype == reference_dtype:", "    if True:"),
    ),
    mutant(
        "only the first output is looked at",
        "test_compare_fails_run_with_failing_output",
        "verdict",
        ("for name, array, wanted in pairs\n", "for name, array, wanted in pairs[:1]\n"),
    ),
    mutant(
        "a missing output is nothing",
        "test_compare_fails_missing_or_extra_output",
        "verdict",
        ("if len(mine) != len(theirs):", "if len(mine) > len(theirs):"),
        ("theirs.items(), strict=True)", "theirs.items(), strict=False)"),
    ),
    mutant(
        "an extra output is nothing",
        "test_compare_fails_missing_or_extra_output",
        "verdict",
        ("if len(mine) != len(theirs):", "if len(mine) < len(theirs):"),
        ("theirs.items(), strict=True)", "theirs.items(), strict=False)"),
    ),
    mutant(
        "a run without outputs passes",
        "test_compare_fails_run_without_outputs",
        "verdict",
        ("if not mine:", "if False:"),
    ),
    mutant(
        "names of outputs do not count",
        "test_compare_pairs_outputs_by_name_in_any_order",
        "verdict",
        ("if mine.keys() == theirs.keys():", "if False:"),
    ),
    mutant(
        "empty outputs pass in silence",
        "test_compare_reports_pass_of_only_empty_outputs",
        "verdict",
        ("_NOTHING if empty else ", ""),
    ),
    stats(
        "the last, partial chunk is skipped",
        "test_measure_covers_elements_at_chunk_boundaries",
        "range(equal, size, chunk)",
        "range(equal, size - chunk + 1, chunk)",
    ),
    stats(
        "equal at first is equal",
        "test_measure_covers_elements_at_chunk_boundaries",
        "if equal < size:",
        "if equal == 0 < size:",
    ),
    stats(
        "only mismatches of the last chunk count",
        "test_measure_covers_elements_at_chunk_boundaries",
        "self.mismatches += count",
        "self.mismatches = count",
    ),
    stats(
        "strings after the first chunk are skipped",
        "test_measure_compares_strings_in_every_chunk",
        "for start in range(0, size, chunk):\n        a, b",
        "for start in range(0, min(size, chunk), chunk):\n        a, b",
    ),
    mutant(
        "strided tensors are read as they lie in memory",
        "test_compare_ignores_layout_byte_order_and_memory_maps",
        "values",
        ("plain.flat\n", 'plain.ravel(order="K")\n'),
    ),
    # Zeros, NaN, infinities.
    mutant(
        "zeros are as good as anything",
        "test_compare_fails_zeros_within_tolerance",
        "reasons",
        ("if stats.zeroed:", "if False:"),
    ),
    stats(
        "NaN agrees with everything",
        "test_compare_requires_nan_and_infinity_by_position",
        "np.isnan(x) & np.isnan(y)",
        "np.isnan(x) | np.isnan(y)",
    ),
    stats(
        "infinities agree with everything",
        "test_compare_requires_nan_and_infinity_by_position",
        "np.equal(x, y) |",
        "np.isinf(x) | np.isinf(y) |",
    ),
    stats(
        "the sign of an infinity does not count",
        "test_compare_requires_nan_and_infinity_by_position",
        "np.equal(x, y) |",
        "np.equal(np.abs(x), np.abs(y)) |",
    ),
    stats(
        "what is not finite is left out",
        "test_compare_requires_nan_and_infinity_by_position",
        "wrong = self._mask_disagreeing(x, y, ok)",
        "wrong = None",
    ),
    # The bound.
    stats(
        "rtol and atol are swapped",
        "test_tolerance_adds_atol_and_rtol_times_reference",
        "rtol, atol = self.tolerance.rtol, self.tolerance.atol",
        "atol, rtol = self.tolerance.rtol, self.tolerance.atol",
    ),
    stats(
        "rtol is a share of the board's value",
        "test_tolerance_adds_atol_and_rtol_times_reference",
        "*self._compute_magnitudes(d, y), wrong",
        "*self._compute_magnitudes(d, x), wrong",
    ),
    stats(
        "rtol is a share of the largest reference",
        "test_tolerance_adds_atol_and_rtol_times_reference",
        "np.multiply(y, rtol, out=y)",
        "np.full_like(y, rtol * y.max())",
    ),
    stats(
        "only values that are too large count",
        "test_tolerance_adds_atol_and_rtol_times_reference",
        "return np.abs(d, out=d), np.abs(y, out=y)",
        "return d, np.abs(y, out=y)",
    ),
    stats(
        "a difference beside a reference of 0 hides behind rtol",
        "test_compare_fails_small_difference_from_zero_reference",
        "return largest, above",
        "return largest, relative",
    ),
    stats(
        "the short cut takes atol + rtol for the bound",
        "test_tolerance_adds_atol_and_rtol_times_reference",
        "(largest <= atol or",
        "(largest <= atol + rtol or",
    ),
    stats(
        "imaginary parts do not count",
        "test_complex_difference_uses_modulus",
        "np.hypot(d[0::2], d[1::2])",
        "np.abs(d[0::2])",
    ),
    mutant(
        "defaults are ten times as wide",
        "test_every_float_dtype_has_default_tolerance",
        "tolerance",
        ("Tolerance(default.rtol if rtol is None", "Tolerance(10 * default.rtol if rtol is None"),
        ("default.atol if atol is None", "10 * default.atol if atol is None"),
    ),
    mutant(
        "integers may be one off",
        "test_compare_integers_exactly",
        "tolerance",
        ("dtype in EXACT_DTYPES and rtol is None and atol is None", 'dtype == "bool"'),
        (".get(dtype, Tolerance(0.0, 0.0))", ".get(dtype, Tolerance(0.0, 1.0))"),
    ),
    # Number representation.
    stats("64-bit integers are rounded", "test_compare_integers_exactly", 'if self.kind == "integer":', "if False:"),
    stats(
        "everything is rounded to float32",
        "test_compare_integers_exactly",
        "np.empty(reals) for _ in range(3)",
        "np.empty(reals, np.float32) for _ in range(3)",
    ),
    stats(
        "dtypes of less than a byte are not looked at",
        "test_compare_reports_index_of_wrong_element",
        "make_reader(actual), make_reader(reference)",
        'make_reader(actual), make_reader(actual if "int4" in get_dtype_name(actual.dtype) else reference)',
    ),
    stats(
        "bools agree with one another",
        "test_compare_reports_index_of_wrong_element",
        "        x[...] = self._view_reals(a)\n",
        "        x[...] = self._view_reals(b if a.dtype == bool else a)\n",
    ),
    # Vacuous tolerances.
    mutant(
        "rtol may be 1 or more",
        "test_tolerance_rejects_invalid_values",
        "tolerance",
        ("rtol is not None and rtol >= 1", "rtol is not None and rtol >= 100"),
    ),
    mutant(
        "NaN is a tolerance",
        "test_tolerance_rejects_invalid_values",
        "tolerance",
        ("not (math.isfinite(value) and value >= 0)", "value < 0"),
    ),
    mutant(
        "atol may be as wide as the dtype",
        "test_tolerance_rejects_atol_as_wide_as_dtype",
        "tolerance",
        ("atol is not None and atol >= span", "False"),
    ),
    tolerance(
        "a given atol may hide a flipped sign",
        "test_tolerance_rejects_values_accepting_zeros_or_any_order",
        "if tolerance is None or (rtol is None and atol is None):",
        "if True:",
    ),
    tolerance(
        "zeros may agree",
        "test_tolerance_rejects_values_accepting_zeros_or_any_order",
        "if (1 - rtol) * largest <= atol:",
        "if False:",
    ),
    tolerance(
        "any order may agree",
        "test_tolerance_rejects_values_accepting_zeros_or_any_order",
        "if constant < spread <= steps * (atol + rtol * scale.least_extreme):",
        "if False:",
    ),
    # Outputs that cannot be judged.
    tolerance("the default atol is for values of 1", "test_default_atol", "min(scale.rms, 1.0)", "1.0 + 0.0"),
    tolerance("the default atol grows without end", "test_default_atol", "min(scale.rms, 1.0)", "scale.rms"),
    tolerance(
        "zeros make a tensor small",
        "test_default_atol",
        "int(np.count_nonzero(own != 0)) if bottom <= 0 <= top else own.size",
        "own.size",
    ),
    tolerance(
        "a mask makes small values large",
        "test_mask_does_not_scale_default_atol",
        "magnitudes < limit\n",
        "magnitudes < np.inf\n",
    ),
    mutant(
        "noise is not allowed for",
        "test_noise_widens_only_default_atol",
        "stats",
        ("limit += self.allowed(start, start + d.size)", "limit += 0"),
    ),
    mutant(
        "noise widens without a ceiling",
        "test_too_many_jumping_elements_report_blind",
        "allowance",
        ("return sizes if self.is_rare else", "return sizes if True else"),
    ),
    mutant(
        "a jump counts as noise of all",
        "test_noise_above_ceiling_widens_only_jumping_elements",
        "allowance",
        ("where=~above", "where=above | ~above"),
    ),
    mutant(
        "what only noise explains passes",
        "test_output_within_reference_noise_reports_blind",
        "judging",
        ("if stats.mismatches:\n        return found", "if True:\n        return found"),
    ),
    mutant(
        "small values are not looked at",
        "test_compare_judges_small_column_near_large_columns",
        "judging",
        ("(stats.max_rel > limit or stats.beside_zero)", "False"),
    ),
    mutant(
        "columns of small values are not looked at",
        "test_small_rows_of_second_axis_get_listed",
        "small",
        ("for axis in (*_iter_axes(reference.shape), None):\n        many", "for axis in (None,):\n        many"),
    ),
    mutant(
        "few small values make an output blind",
        "test_compare_passes_few_small_values_and_zeros",
        "small",
        ("many = smalls >= share * nonzero", "many = smalls > 0"),
    ),
    mutant(
        "noise hides small values",
        "test_small_column_within_noise_reports_blind",
        "small",
        ("many & (hidden >= _GROUP_SHARE * nonzero) & (hidden > 0)", "many & False"),
    ),
    mutant(
        "any zero counts as flushed",
        "test_compare_counts_and_allows_flushed_subnormals",
        "caveats",
        ("(sizes > 0) & (sizes < smallest)", "(sizes > 0)"),
    ),
    tolerance(
        "a default tolerance may be as wide as the values",
        "test_values_of_few_dtype_steps_report_blind",
        "if largest <= steps * atol:",
        "if False:",
    ),
    mutant(
        "an answer within noise passes",
        "test_output_within_reference_noise_reports_blind",
        "verdict",
        ("not reason and (may_be_blind or not doubt)", "not reason"),
    ),
    mutant(
        "noise makes worse what agrees without it",
        "test_noise_leaves_agreeing_output_unchanged",
        "verdict",
        ("if atol is not None or (plain.passed and not plain.blind):", "if atol is not None:"),
    ),
    mutant(
        "zeros are wrong where the reference is noise",
        "test_zeros_within_reference_noise_report_blind",
        "judging",
        ("if not allowed or (found.stats and found.stats.nonfinite):", "if not allowed or found.stats.zeroed:"),
    ),
    mutant(
        "who may be blind may be wrong",
        "test_allow_blind_permits_blind_but_not_wrong_output",
        "verdict",
        ("not reason and (may_be_blind or not doubt)", "may_be_blind or not (reason or doubt)"),
    ),
    mutant(
        "more error than signal passes",
        "test_error_above_signal_never_passes",
        "judging",
        ("stats.sqnr_db is not None and stats.sqnr_db < 0", "False"),
    ),
    mutant(
        "one blind output makes a wrong one blind",
        "test_verdict_ranks_wrong_above_blind",
        "verdict",
        ("for outcome in (Outcome.FAIL, Outcome.BLIND)", "for outcome in (Outcome.BLIND, Outcome.FAIL)"),
    ),
    mutant(
        "a reference that cannot judge says PASS",
        "test_judge_ignores_blind_reference_if_others_judge",
        "verdict",
        ('return Outcome.BLIND, f"{blind[0].reason}', 'return Outcome.PASS, f"{blind[0].reason}'),
    ),
    # Reported differences.
    stats("cosines rise above 1", "test_cosine_stays_within_unit_range", "min(1.0, max(-1.0, cosine))", "cosine"),
    mutant(
        "sums are of float32",
        "test_measure_covers_elements_at_chunk_boundaries",
        "values",
        ("total = np.dot(x[whole:], y[whole:])", "total = np.float32(np.dot(x[whole:], y[whole:]))"),
    ),
    mutant(
        "ULP does not know of signs",
        "test_max_ulp_counts_representable_values_without_overflow",
        "ulp",
        ("crossing = highest >= top", "crossing = False"),
    ),
    mutant(
        "ULP of two signs wraps around",
        "test_max_ulp_counts_representable_values_without_overflow",
        "ulp",
        ("np.add(a, b, out=scratch)", "np.subtract(a, b, out=scratch)"),
    ),
    # Masks and saturated values.
    stats(
        "masks are in the sums",
        "test_masks_do_not_hide_errors_of_visible_values",
        "if self._may_have_masks(y, sums[2]):",
        "if False:",
    ),
    stats(
        "masks that are equal are in the sums",
        "test_masks_found_in_any_chunk",
        "if self._may_have_masks(y, energy):",
        "if False:",
    ),
    stats(
        "a mask in the reference alone is left out",
        "test_mask_in_single_tensor_fails",
        "(np.abs(x) >= low_x) & ",
        "",
    ),
    stats(
        "a mask in the board's answer alone is left out",
        "test_mask_in_single_tensor_fails",
        " & (np.abs(y) >= low_y)",
        "",
    ),
    stats(
        "a mask agrees with one of another sign",
        "test_mask_in_single_tensor_fails",
        " & (np.signbit(x) == np.signbit(y))",
        "",
    ),
    stats(
        "where there are only masks all is well",
        "test_masks_compare_element_by_element",
        "(self.finite if one.masks else self.visible)",
        "self.finite",
    ),
    # Multiple references.
    mutant(
        "references that disagree are not mentioned",
        "test_judge_passes_board_if_references_disagree or test_judge_notes_disagreement_of_agreeing_references",
        "verdict",
        ("    disputes = [", "    disputes: list[str] = [] and ["),
    ),
    mutant(
        "one reference of several is enough",
        "test_judge_fails_board_unlike_either_agreeing_reference",
        "verdict",
        ("    if not failed:\n        agreed", "    if agreeing:\n        agreed"),
    ),
    mutant(
        "any answer is near the plain model's",
        "test_output_too_far_below_minimum_sqnr",
        "verdict",
        ("not output.sqnr_db >= min_sqnr_db", "False"),
    ),
    mutant(
        "what cannot be compared is near the plain model's",
        "test_output_too_far_below_minimum_sqnr",
        "verdict",
        ("if (output.sqnr_db is None or output.nonfinite) and not output.passed:", "if False:"),
    ),
]


def ends(chosen: list[Mutant]) -> list[dict[str, Any]]:
    """Run the comparer's tests under each mutant and return the results."""
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


def test_comparer_tests_detect_every_mutant() -> None:
    for one, end in zip(MUTANTS, ends(MUTANTS), strict=True):
        # A mutant that cannot be imported, or that selects zero tests, proves nothing.
        assert end["exit_code"] == pytest.ExitCode.TESTS_FAILED, f"{one.weakness}: {end}"
        assert end["message"].startswith(("assert ", "AssertionError", "Failed: DID NOT RAISE")), (one.weakness, end)


def test_comparer_tests_pass_without_mutation() -> None:
    every = " or ".join({one.noticed_by for one in MUTANTS})
    [end] = ends([mutant("nothing", every, "verdict")])
    assert end["exit_code"] == pytest.ExitCode.OK and end["passed"] > 500, end


def test_mutant_runner_rejects_missing_text() -> None:
    [end] = ends([mutant("something", "test_cosine", "verdict", ("no such text", ""))])
    assert end["exit_code"] is None and "0 times" in end["message"]
