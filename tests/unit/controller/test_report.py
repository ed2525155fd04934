"""The final screen fits the terminal, and says what has to be said."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from hil.compare.verdict import compare
from hil.controller.report import print_verdict, verdict_record
from hil.controller.runs import jsonable
from hil.results import RunResult


def shown(names, actual, reference, width=80):
    verdict = compare(
        RunResult("board", dict.fromkeys(names, actual)), RunResult("oracle", dict.fromkeys(names, reference))
    )
    console = Console(file=io.StringIO(), width=width)
    print_verdict(console, verdict_record(verdict))
    return console.file.getvalue()


@pytest.mark.parametrize("name", ["y", "logits", "StatefulPartitionedCall/model/block_12/dense/BiasAdd:0"])
@pytest.mark.parametrize("shape", [(), (10,), (1, 3, 64, 64)])
def test_a_table_fits_80_columns_with_one_line_an_output(name, shape):
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape).astype(np.float32) for _ in range(2))
    lines = shown([name], a, b).splitlines()
    assert max(map(len, lines)) <= 80
    assert "SQNR dB" in lines[1] and "mismatches" in lines[1]
    assert f"{a.size} of {a.size}" in lines[2]
    assert "…" not in lines[2] or len(name) > 20
    assert name in "".join(line.strip() for line in lines[3:])


def test_every_output_that_differs_is_told_but_not_hundreds():
    text = shown([f"y{number}" for number in range(30)], np.zeros(3, np.int32), np.ones(3, np.int32))
    assert text.count("the reference's are not") == 20
    assert "and 10 more outputs" in text


def test_a_different_count_of_outputs_is_told():
    verdict = compare(RunResult("board", {}), RunResult("oracle", {"y": np.zeros(1)}))
    console = Console(file=io.StringIO(), width=80)
    print_verdict(console, verdict_record(verdict))
    assert "the reference has 1" in console.file.getvalue()


def test_brackets_in_a_name_are_no_markup():
    assert "y[/red]" in shown(["y[/red]"], np.zeros(1), np.ones(1), width=120)


def test_integers_are_told_to_be_exact():
    assert "against      oracle, exact" in shown(["y"], np.zeros(3, np.int32), np.zeros(3, np.int32))


def test_a_pass_that_compared_nothing_says_so():
    assert "note         0 elements compared" in shown(["y"], np.zeros((0, 3)), np.zeros((0, 3)))
    assert "note" not in shown(["y"], np.zeros(3), np.zeros(3))


def test_a_stored_record_shows_what_json_has_no_number_for():
    same = np.array([1.0, np.nan], np.float32)
    verdict = compare(RunResult("board", {"y": same}), RunResult("oracle", {"y": same}))
    stored = json.loads(json.dumps(jsonable(verdict_record(verdict)), allow_nan=False))
    console = Console(file=io.StringIO(), width=100)
    print_verdict(console, stored)
    assert "inf" in console.file.getvalue().splitlines()[-1].split()
