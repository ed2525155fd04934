"""Each run option has one definition for the library, the command line and records."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from hil.controller.cli.main import cli
from hil.controller.pipeline.settings.options import (
    CaseSettings,
    Job,
    Options,
    RunSettings,
    check_counts,
    flag_of,
    list_specs,
    make_options,
)
from hil.controller.pipeline.settings.project import read_project
from hil.controller.pipeline.settings.repeat import run_command
from hil.controller.workloads.suites.request import Settings, SuiteRequest
from hil.core.text import convert_to_json
from hil.errors import UsageError
from hil.testing.pytest_plugin.options import OPTIONS

SHOWN = {name: flag_of(name, spec) for name, spec in list_specs(RunSettings).items() if spec.help}


def help_of(*words: str) -> str:
    return CliRunner().invoke(cli, [*words, "--help"]).output


@pytest.mark.parametrize("verb", ["run", "bench"])
def test_run_verbs_show_every_option(verb: str) -> None:
    text = help_of(verb)
    assert [flag for flag in SHOWN.values() if f"{flag} " not in text] == []


def test_suites_and_pytest_have_every_case_option() -> None:
    flags = [flag_of(name, spec) for name, spec in list_specs(CaseSettings).items()]
    text, named = help_of("suite", "run"), {option.name for option in OPTIONS}
    assert [flag for flag in flags if f"{flag} " not in text] == []
    assert {f"--hil-{flag[2:]}" for flag in flags} <= named


def test_library_options_match_and_validate() -> None:
    assert make_options({"seed": 3, "rtol": 1, "dims": {"N": 2}}) == Options(seed=3, rtol=1.0, dims={"N": 2})
    with pytest.raises(UsageError, match=r"unknown hil\.run option 'sead'") as unknown:
        make_options({"sead": 3})
    assert "did you mean 'seed'" in unknown.value.hint
    with pytest.raises(UsageError, match=r"iterations must be a whole number from 1 to 1,000,000, got 1\.5"):
        make_options({"iterations": 1.5})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("iterations", 0),
        ("iterations", 2**32),
        ("warmup", -1),
        ("warmup", 2**32),
        ("repeat", 100_001),
        ("recompile", 10_001),
    ],
)
def test_every_interface_rejects_count_out_of_range(tmp_path: Path, name: str, value: int) -> None:
    wanted = f"{name} must be a whole number from [01] to [0-9,]+, got {value}"
    with pytest.raises(UsageError, match=wanted):
        make_options({name: value})
    with pytest.raises(UsageError, match=f"--{wanted}"):
        check_counts(Options(**{name: value}))
    for command in (["run"], ["suite", "run"]):
        result = CliRunner().invoke(cli, [*command, "missing.onnx", f"--{name}={value}"])
        assert isinstance(result.exception, UsageError) and re.search(f"--{wanted}", result.exception.message)
    file = tmp_path / "hil.toml"
    file.write_text(f'[models."*"]\n{name} = {value}\n')
    with pytest.raises(UsageError, match=wanted):
        read_project(file)


def test_job_and_request_round_trip() -> None:
    settings = {"rtol": 0.5, "allow_blind": ("y",), "debug_ir": Path("ir"), "seed": 3}
    job = Job((Path("a.onnx"),), "sim", inputs=("x=x.npy",), dims={"N": 1}, profile=Path("p"), **settings)
    assert Job.from_record(json.loads(json.dumps(convert_to_json(dataclasses.asdict(job))))) == job
    assert job.make_options().profile and job.make_options().debug_ir == Path("ir")
    request = SuiteRequest("@models", boards=("a", "b"), settings=Settings(profile=True, **settings))
    assert SuiteRequest.from_json(json.loads(json.dumps(convert_to_json(request.to_json())))) == request


def test_repeat_command_contains_deciding_options_only() -> None:
    settings = Settings(seed=3, atol=0.25, allow_blind=("y*",), debug_ir=Path("ir"), recompute=True, no_fallback=True)
    command = SuiteRequest("@models", settings=settings).command("case")
    assert command.endswith("--seed 3 --atol 0.25 --allow-blind 'y*' --no-fallback")


def test_options_separate_size_ranges_from_sizes() -> None:
    options = make_options({"dims": {"N": "1..8", "M": 2}})
    assert options.dims == {"M": 2} and options.dim_ranges == {"N": (1, 8)}
    with pytest.raises(UsageError, match="dims must be sizes by name"):
        make_options({"dims": {"N": "8..1"}})


def test_size_ranges_round_trip() -> None:
    job = Job(models=(Path("net.onnx"),), dims={"N": "1..8", "M": 2})  # type: ignore[dict-item]
    again = Job.from_record(json.loads(json.dumps(convert_to_json(dataclasses.asdict(job)))))
    assert again.dims == {"M": 2} and list(again.dim_ranges["N"]) == [1, 8]
    assert run_command(again) == "hil run net.onnx --dim M=2 --dim N=1..8"
