"""A test file that is run by itself: what its command line takes."""

from __future__ import annotations

import unittest

import pytest

from hil.controller.pipeline.options import CaseSettings
from hil.testing.traces import testcase


@pytest.fixture(autouse=True)
def _no_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unittest, "main", lambda **_: None)
    monkeypatch.setattr(testcase, "_typed", testcase.TraceOptions())


def test_a_test_file_takes_the_settings_of_cases() -> None:
    testcase.main(["--seed=3", "--rtol", "0.5", "--no-fallback", "--timeout=5", "--allow-blind=a", "--allow-blind=b"])
    wanted = CaseSettings(seed=3, rtol=0.5, no_fallback=True, timeout=5.0, allow_blind=("a", "b"))
    assert testcase._typed.settings == wanted


@pytest.mark.parametrize(("word", "said"), [("--seed=1.5", "--seed"), ("--timeout=-1", "timeout must be a number")])
def test_a_setting_that_is_wrong_is_refused_as_argparse_does(
    capsys: pytest.CaptureFixture[str], word: str, said: str
) -> None:
    with pytest.raises(SystemExit):
        testcase.main([word])
    assert said in capsys.readouterr().err
