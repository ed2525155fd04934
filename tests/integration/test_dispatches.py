"""`hil layers --dispatches`: runs of single dispatches."""

from __future__ import annotations

import shlex

import pytest
from support.models import DIGITS

MODEL = DIGITS / "digits_cnn.onnx"
KEY = "digits_cnn$async_dispatch_5_matmul_1x10x128_f32"


def test_wrong_dispatch_is_stored_and_repeated(hil):
    options = ("--dispatches", "--dispatch", KEY, "--fault", "corrupt", "--out", "wrong", "--json")
    ended = hil("layers", MODEL, *options)
    assert ended.code == 1, ended.err
    (found,) = ended.document["dispatches"]
    assert found["key"] == KEY and found["nodes"] == ["fc1"] and found["against"] == "numpy"
    assert found["finding"]["outcome"] == "FAIL" and found["device_p50_ns"] > 0
    program, *words = shlex.split(found["run"])
    assert program == "hil" and words[2:4] == ["--fault", "corrupt"]
    assert hil(*words[:2], *words[4:], "--json").case["outcome"] == "PASS"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dispatch", KEY], "--dispatch requires --dispatches"),
        (["--dispatches", "--group", "fused"], "--group cannot be used with --dispatches"),
        (["--dispatches", "--dispatch", KEY[:-1]], f"did you mean '{KEY}'"),
    ],
)
def test_dispatch_options_are_checked(hil, options, message):
    ended = hil("layers", MODEL, *options)
    assert ended.code == 2 and message in ended.err, ended.err
