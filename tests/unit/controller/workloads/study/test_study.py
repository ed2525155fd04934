"""A study's experiments, rows and table, without a compiler."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from hil.compare.criteria import parse_accept
from hil.controller.backends.references.noise import encode_noise
from hil.controller.records.base import make_record
from hil.controller.records.study import StudyDeviation, StudyRow, StudyStage, make_study
from hil.controller.workloads.study.record import exit_code, merge_rows, read_study, summarize_rows
from hil.controller.workloads.study.run import CannotBeJudged, Differs, match_steps
from hil.controller.workloads.study.show import format_markdown, list_cells, list_failures, write_tables
from hil.controller.workloads.study.toolchains import TOOLCHAINS
from hil.core.results import Outcome, Relation
from hil.errors import UsageError

FOURTEEN = Path(__file__).parents[5] / "examples" / "tfcompile_study"


def fresh_row(toolchain, experiment="fc", **values):
    stages = [StudyStage(name=name) for name in TOOLCHAINS[toolchain].all_stages]
    known = {"title": "Fully | connected", "reported": "pass", "relation": Relation.INDEPENDENT, "stages": stages}
    return StudyRow(experiment=experiment, toolchain=toolchain, **{**known, **values})


def row(toolchain, failed="", outcome=Outcome.PASS):
    found = fresh_row(toolchain, outcome=outcome, compiler=f"{toolchain} 1.0", bytes=2048)
    for stage in found.stages:
        stage.seconds = 1.5
        if stage.name == failed:
            found.fail(stage, "it | broke")
            return found
        stage.outcome = "pass"
    found.steps, found.worst = 5, StudyDeviation(max_abs=2e-7, max_ulp=2, of="loss", step=1)
    return found


def stored(*rows):
    """Return study.json of these rows."""
    settings = {"steps": 1, "seed": 0, "rtol": 0.1, "atol": None, "allow_blind": [], "no_fallback": False}
    head = {"schema": 1, "folder": "x", "asked": settings, "board": {}, "finished": True, "exit_code": 0}
    return {**head, "rows": [one if isinstance(one, dict) else one.to_json() for one in rows]}


def test_example_study_contains_reported_experiments():
    # Four experiments are repeated with the TensorFlow 1 optimizer; the report has them once.
    again = {"fc_adam_v1", "fc_batchnorm_adam_v1", "conv_fc_adam_v1", "conv_fc_batchnorm_adam_v1"}
    every = read_study(FOURTEEN)
    listed = [one for one in every if one.name not in again]
    assert len(listed) == 14 and len(every) == 18
    assert {one.name for one in listed} == {path.parent.name for path in FOURTEEN.glob("*/model.py")} - again
    refused = [one.name for one in listed if one.reported != "pass"]
    assert refused == ["dynamic_rnn", "keras_rnn", "rnn_seq_length"]
    assert {one.reported for one in listed if one.reported != "pass"} == {
        "compile: XLA compilation requires a fixed stack size upper bound"
    }
    assert [one.name for one in read_study(FOURTEEN, ["keras_rnn", "fc"])] == ["fc", "keras_rnn"]


@pytest.mark.parametrize(
    ("text", "only", "message"),
    [
        (None, (), "is not a study"),
        ("", (), "contains no experiments"),
        ("[fc", (), "cannot be read"),
        ("[fc]\nspeed = 'slow'\n", (), "unknown key 'speed'"),
        ("fc = 1\n", (), "table of strings"),
        ("[gone]\n", (), r"\[gone\]: no such file"),
        ("[fc]\n", ("fd",), "experiment 'fd' not found"),
    ],
)
def test_read_study_rejects_invalid_file(tmp_path, text, only, message):
    (tmp_path / "fc").mkdir()
    (tmp_path / "fc" / "model.py").touch()
    if text is not None:
        (tmp_path / "study.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_study(tmp_path, only)


def test_row_round_trips():
    for one in (row("tfcompile"), row("iree", "lower to StableHLO", Outcome.COMPILE_ERROR)):
        assert make_record(one.to_json(), StudyRow) == one
    one.program = "fc/iree/program.vmfb"
    one.worst = StudyDeviation(max_abs=float("inf"), max_ulp=None, of="loss", step=1)
    again = make_record(one.to_json(), StudyRow)
    assert (again.program, again.worst.max_abs, list_cells(again)["max difference"]) == (one.program, "inf", "inf")


def test_table_names_failed_stage(tmp_path):
    rows = [row("tfcompile", "link", Outcome.COMPILE_ERROR), row("iree")]
    broken, fine = map(list_cells, rows)
    assert (broken["config / lower"], broken["link"], broken["load"], broken["outcome"]) == (
        "1.5 s",
        "FAIL",
        "-",
        "COMPILE_ERROR",
    )
    assert (fine["link"], fine["match"], fine["size"], fine["reported"]) == ("none", "5 steps", "2 KiB", "pass")
    assert list_failures(rows) == ["fc, tfcompile: link: it | broke"]
    assert "- fc, tfcompile: link: it | broke" in format_markdown(rows)
    write_tables(rows, tmp_path)
    written = list(csv.DictReader((tmp_path / "study.csv").read_text().splitlines()))
    assert [(line["toolchain"], line["failed_stage"], line["message"], line["match"]) for line in written] == [
        ("tfcompile", "link", "it | broke", "not reached"),
        ("iree", "", "", "pass"),
    ]
    assert summarize_rows(rows) == "tfcompile: 0 of 1 passed; iree: 1 of 1 passed"


def test_table_marks_pass_by_same_library(tmp_path):
    rows = [row("tfcompile").replace(relation=Relation.SAME_LIBRARY), row("iree")]
    assert [list_cells(one)["outcome"] for one in rows] == ["PASS (same library)", "PASS"]
    assert "PASS (same library)" in format_markdown(rows)
    write_tables(rows, tmp_path)
    assert [line["relation"] for line in csv.DictReader((tmp_path / "study.csv").read_text().splitlines())] == [
        "same library",
        "independent",
    ]


def test_csv_escapes_formula_in_message(tmp_path):
    write_tables([row("tfcompile", "link", Outcome.COMPILE_ERROR).replace(message="=cmd|' /C calc'!A0")], tmp_path)
    [line] = csv.DictReader((tmp_path / "study.csv").read_text().splitlines())
    assert line["message"] == "'=cmd|' /C calc'!A0"


def test_exit_code_follows_gravest_outcome():
    assert exit_code([row("iree")], False) == 0
    assert exit_code([row("iree"), row("iree", "match", Outcome.FAIL)], False) == 1
    assert exit_code([row("iree", "compile", Outcome.COMPILE_CRASH), row("iree", "match", Outcome.FAIL)], False) == 3
    assert exit_code([], False) == 5
    assert exit_code([row("iree")], True) == 130


def test_row_of_earlier_version_is_read():
    document = row("iree").to_json()
    document["way"] = document.pop("toolchain")
    del document["program"]
    assert make_study(stored(document)).rows == [row("iree")]


def test_resumed_study_preserves_finished_rows():
    lost = row("tfcompile", "run", Outcome.BOARD_LOST)
    fresh = [fresh_row("tfcompile"), fresh_row("iree")]
    other, unfinished = fresh_row("iree", "conv", outcome=Outcome.FAIL), fresh_row("iree", "rnn")
    rows = make_study(stored(lost, row("iree").replace(title="before"), other, unfinished)).rows
    assert merge_rows(rows, fresh) == [fresh[0], row("iree"), other]
    assert merge_rows([], fresh) == fresh


def test_invalid_row_is_refused():
    with pytest.raises(UsageError, match=r"missing required field `\w+` - at `\$.rows\[0\]`"):
        make_study(stored({"experiment": "fc", "toolchain": "iree", "outcome": "PASS"}))


TRAINED = [
    {
        "loss": np.array(1 - step / 10, np.float32),
        "variable kernel": np.arange(1, 5, dtype=np.float32) + step,
        "variable squares": np.full(3, 1e-6, np.float32) * (step + 1),
        "variable gradient of zero": np.array([3e-10, -1e-10, 2e-10], np.float32),
        "variable count": np.array(step),
    }
    for step in range(3)
]


def match(results, trained=TRAINED, *, atol=None, noise=None, **allowed):
    found = row("iree")
    found.steps, found.worst = 0, None
    try:
        match_steps(found, results, lambda step: (trained[step], noise or {}), rtol=1e-4, atol=atol, **allowed)
    except (Differs, CannotBeJudged) as error:
        return found, error.message
    return found, ""


def test_match_steps_requires_every_output_to_agree():
    near = [{**step, "loss": step["loss"] * np.float32(1 + 5e-5)} for step in TRAINED]
    found, message = match(near)
    assert (found.steps, message) == (3, "")
    assert (found.worst.of, found.worst.max_abs > 0) == ("loss", True)
    for step in range(3):
        for name, value in TRAINED[step].items():
            # Squares are small; an error of a thousandth of the other values' size must still fail.
            off = np.asarray(value) + np.asarray(1 if value.dtype.kind == "i" else value.dtype.type(1e-3) * value)
            changed = [dict(one) for one in TRAINED]
            changed[step][name] = off.astype(value.dtype)
            found, message = match(changed)
            assert found.steps == step and message.startswith(f"step {step + 1} of 3: {name}: "), message


def test_match_steps_treats_noise_as_blind():
    name = "variable gradient of zero"
    other = [{**step, name: -step[name]} for step in TRAINED]
    found, message = match(other)
    assert message.startswith(f"step 1 of 3: {name}: 3 of 3 values out of tolerance"), "nobody measured its noise"
    noise = {name: encode_noise(np.full(3, 4e-9))}
    found, message = match(other, noise=noise)
    assert (
        found.steps == 3
        and message.startswith(f"step 1 of 3: {name}: ")
        and "within the rounding noise of the reference (7.5e-09)" in message
    )
    assert match(other, noise=noise, allow_blind=["variable gradient*"])[1] == ""
    far = [{**step, name: step[name] + np.float32(1e-3)} for step in TRAINED]
    assert "out of tolerance" in match(far, noise=noise, allow_blind=["*"])[1], "it is wrong beyond all noise"


def test_criteria_apply_to_named_tensors():
    near = [{**step, "loss": step["loss"] + np.float32(0.3)} for step in TRAINED]
    assert match(near, accept=parse_accept(["loss: max_abs<=0.4"]))[1] == ""
    assert "max_abs<=0.2 is not met" in match(near, accept=parse_accept(["loss: max_abs<=0.2"]))[1]


def test_absolute_tolerance_applies_to_match():
    near = [{**step, "loss": step["loss"] + np.float32(0.3)} for step in TRAINED]
    assert "loss" in match(near)[1]
    assert match(near, atol=0.4, allow_blind=["variable*"])[1] == ""
    found, message = match(near, atol=0.4)
    assert found.steps == 3 and "flipped signs would agree" in message


def test_match_steps_rejects_empty_comparison():
    assert "no steps to compare" in match([])[1]
    assert "no outputs or variables to compare" in match([{}], [{}])[1]
    fewer = [{name: value for name, value in step.items() if name != "variable count"} for step in TRAINED]
    assert "only the program or only TensorFlow returns these values: variable count" in match(fewer)[1]
    assert "variable count" in match(TRAINED, fewer)[1]


def test_diverged_training_matches_only_diverged_training():
    diverged = [{"loss": np.array([np.nan, np.inf, 1], np.float32)}]
    assert match(diverged, diverged)[1] == ""
    assert "loss" in match([{"loss": np.array([np.nan, 2, 1], np.float32)}], diverged)[1]


@pytest.mark.ci
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is not None, reason="TensorFlow is installed here")
@pytest.mark.parametrize(("toolchain", "extra"), [("iree", "tensorflow"), ("tfcompile", "tfcompile")])
def test_study_without_tensorflow_names_extra(hil, tmp_path, toolchain, extra):
    done = hil("study", "run", FOURTEEN, "--experiment", "fc", "--compiler", toolchain)
    assert done.code == 2
    assert f"[{extra}]" in done.err
    assert not (tmp_path / "hil-study").exists()
