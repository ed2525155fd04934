"""`hil layers --dispatches`: runs of single dispatches."""

from __future__ import annotations

import shlex

import pytest
from support.models import DIGITS

MODEL = DIGITS / "digits_cnn.onnx"
KEY = "digits_cnn$async_dispatch_5_matmul_1x10x128_f32"


def test_wrong_dispatch_is_stored_and_repeated(hil, tmp_path):
    options = ("--dispatches", "--dispatch", KEY, "--iterations", "2")
    ended = hil("layers", MODEL, *options, "--json")
    assert ended.code == 0, ended.err
    (found,) = ended.document["dispatches"]
    assert found["key"] == KEY and found["nodes"] == ["fc1"] and found["against"] == "numpy"
    assert found["finding"]["outcome"] == "PASS" and found["device_p50_ns"] > 0
    ended = hil("layers", MODEL, *options, "--fault", "corrupt", "--out", "wrong")
    assert ended.code == 1 and "0 of 1 dispatches passed" in ended.out
    command = ended.out.splitlines()[-1].removeprefix("repeat the first with: hil ")
    assert "--fault corrupt" in command
    ended = hil(*shlex.split(command.replace("--fault corrupt", "")))
    assert ended.code == 0 and "PASS" in ended.out, ended.out


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
