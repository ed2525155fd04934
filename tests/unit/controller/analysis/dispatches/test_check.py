"""Outcomes of dispatches that run alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.analysis.bisect.find import judge_case
from hil.controller.analysis.dispatches.check import skip_if_rejected_alone
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.settings.options import Options
from hil.core.results import Outcome, Stage
from hil.errors import CompileFailed, HilError, StageTimeout


def make_failed_case(error: HilError) -> Case:
    return Case("fc1", Path("fc1.mlir"), Options(), Path()).with_error(error, Stage.COMPILE)


@pytest.mark.parametrize(("accepts_model", "outcome"), [(True, Outcome.SKIP), (False, Outcome.COMPILE_ERROR)])
def test_dispatch_rejected_only_alone_is_skipped(accepts_model: bool, outcome: Outcome) -> None:
    case = skip_if_rejected_alone(make_failed_case(CompileFailed("op is illegal")), lambda: accepts_model)
    finding = judge_case(case, None, None)
    assert finding.outcome is outcome
    assert finding.reason.endswith("op is illegal")
    assert ("in the model, but not alone" in finding.reason) is accepts_model


def test_other_error_does_not_compile_the_model() -> None:
    case = make_failed_case(StageTimeout("iree-compile took too long"))
    assert skip_if_rejected_alone(case, lambda: pytest.fail("compiles the model")) is case
