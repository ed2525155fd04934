"""Waiting for jobs on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hil.controller.cli.farm_wait import wait_for
from hil.errors import FarmUnreachable


class Farm:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def follow(self, jobs: Any, *, logs: bool) -> Iterator[Any]:
        raise self.error
        yield


@pytest.mark.parametrize("error", [KeyboardInterrupt(), FarmUnreachable("nobody answers")])
def test_who_waits_no_longer_is_told_that_the_job_goes_on(error: BaseException, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(type(error)):
        wait_for(Farm(error), 17, ["17"], logs=True, as_json=False)
    assert "job 17 goes on: hil farm logs 17 -f" in capsys.readouterr().err
