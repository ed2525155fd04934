"""The command line of a test file run as a script."""

from __future__ import annotations

import unittest

import pytest

from hil.controller.pipeline.settings.options import CaseSettings
from hil.testing.traces import testcase


@pytest.fixture(autouse=True)
def _no_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unittest, "main", lambda **_: None)
    monkeypatch.setattr(testcase, "_typed", testcase.TraceOptions())


def test_testcase_main_accepts_case_settings() -> None:
    testcase.main(["--seed=3", "--rtol", "0.5", "--no-fallback", "--timeout=5", "--allow-blind=a", "--allow-blind=b"])
    wanted = CaseSettings(seed=3, rtol=0.5, no_fallback=True, timeout=5.0, allow_blind=("a", "b"))
    assert testcase._typed.settings == wanted


@pytest.mark.parametrize(("word", "said"), [("--seed=1.5", "--seed"), ("--timeout=-1", "timeout must be a number")])
def test_testcase_main_reports_invalid_setting_like_argparse(
    capsys: pytest.CaptureFixture[str], word: str, said: str
) -> None:
    with pytest.raises(SystemExit):
        testcase.main([word])
    assert said in capsys.readouterr().err
