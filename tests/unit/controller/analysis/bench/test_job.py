"""Reject invalid bench jobs before compiling or storing anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.contexts import context_without_workers
from support.models import DIGITS

from hil.compare.generation.results import GenerationVerdict
from hil.controller.analysis.bench.job import _BenchRun, _drop_references, _refuse_different_devices, run_bench
from hil.controller.analysis.bench.stats import BenchJob
from hil.controller.cli.screen import Screen
from hil.controller.devices.board_choice import use_device
from hil.controller.devices.choosing.board_resolver import choose
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.records.restored import restore_board
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.options import Job, Options
from hil.core.results import Outcome, RunResult
from hil.errors import UsageError

MODEL = DIGITS / "digits_cnn.onnx"
NO_KEYS = {"identity": None, "known_hosts": None, "accept_new_host_key": False}


@pytest.mark.parametrize(
    ("models", "settings", "said"),
    [
        (0, {}, "expected 1 or 2 MODEL arguments, got 0"),
        (3, {}, "expected 1 or 2 MODEL arguments, got 3"),
        (2, {"against": "latest"}, "--against requires a single MODEL"),
        (1, {"against": "nothing"}, "run 'nothing' not found"),
        (1, {"iterations": 0}, "--iterations must be a whole number from 1 to 1,000,000, got 0"),
        (1, {"iterations": 2**32}, "--iterations must be a whole number from 1 to 1,000,000, got 4294967296"),
        (2, {"iterations": 19}, "invalid --iterations 19: a comparison requires at least 20"),
        (1, {"against": "nothing", "iterations": 19}, "a comparison requires at least 20 per model"),
        (1, {"min_time_s": 0.0}, "invalid --min-time 0: expected more than 0 seconds"),
        (1, {"min_time_s": float("nan")}, "invalid --min-time nan: expected more than 0 seconds"),
        (1, {"warmup": -1}, "--warmup must be a whole number from 0 to 1,000,000, got -1"),
        (1, {"warmup": 10**20}, "--warmup must be a whole number from 0 to 1,000,000, got 1000"),
        (1, {"concurrency": 0}, "invalid --concurrency 0: expected 1 to 32"),
        (1, {"concurrency": 33}, "invalid --concurrency 33: expected 1 to 32"),
        (2, {"concurrency": 2}, "--concurrency supports only a single program"),
        (2, {"min_effect": 1.0}, "invalid --min-effect 100: expected 0 to less than 100"),
        (2, {"min_effect": float("nan")}, "invalid --min-effect nan: expected 0 to less than 100"),
        (1, {"fail_if_slower": 0.05}, "--fail-if-slower requires a comparison"),
        (2, {"sustained_s": 60.0}, "--sustained does not support a second program"),
        (1, {"sustained_s": 60.0, "iterations": 10}, "--sustained does not support --iterations"),
        (1, {"sustained_s": 60.0, "concurrency": 2}, "--sustained does not support --concurrency"),
        (1, {"sustained_s": 0.5}, "invalid --sustained 0.5s: expected a time from 1 s to 24 h"),
    ],
)
def test_bench_rejects_invalid_settings_before_storing(tmp_path: Path, models, settings, said):
    job = Job(models=(MODEL,) * models, out=tmp_path / "runs")
    with pytest.raises(UsageError, match=said):
        run_bench(BenchJob(job, **settings), screen=Screen(quiet=True))
    assert not (tmp_path / "runs").exists()


def test_stored_run_board_requires_trust_or_explicit_board():
    """A file or an address from a stored run would otherwise be trusted like a typed one."""
    typed, nothing = Job(models=(), board="sim"), Job(models=())
    for board in ("board_configs/evil.toml", "root@10.0.0.7", "unix:/a.sock", "10.0.0.7:7700"):
        stored = Job(models=(), board=board, identity=Path("key"), accept_new_host_key=True)
        assert restore_board(stored, nothing, own=True) == stored
        assert restore_board(stored, typed, own=False) == replace(stored, board="sim", **NO_KEYS)
        with pytest.raises(UsageError, match="this user did not create its record at this path"):
            restore_board(stored, nothing, own=False)
    stored = Job(models=(), board="kitchen", identity=Path("key"), accept_new_host_key=True)
    assert restore_board(stored, nothing, own=False) == replace(stored, **NO_KEYS)


@pytest.mark.parametrize("settings", [{"concurrency": 2}, {"against": "latest"}])
def test_bench_rejects_options_that_do_not_support_prompts(tmp_path: Path, settings):
    job = Job(models=(MODEL,), generate=tmp_path / "prompts.toml", out=tmp_path / "runs")
    with pytest.raises(UsageError, match=f"--generate does not support --{next(iter(settings))}"):
        run_bench(BenchJob(job, **settings), screen=Screen(quiet=True))


def test_bench_names_cases_of_similar_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def begin(runner: Runner, path: Path, options: Any, folder: Path, *, name: str, want_inputs: bool) -> Case:
        return Case(name, path, options, folder)

    monkeypatch.setattr(Runner, "begin", begin)
    spec = tmp_path / "spec.toml"
    spec.write_text("\n".join(f"[[prompt]]\nname = {name!r}\ntokens = [1]" for name in ("a b", "a/b", "a_b")))
    bench = BenchJob(Job(models=(MODEL,), generate=spec, out=tmp_path))
    run = _BenchRun(bench, context_without_workers(tmp_path), Screen(quiet=True))
    run._import_cases(None)
    assert [case.name for case in run.cases] == [f"digits_cnn-a_b{end}" for end in ("", "-2", "-3")]


def test_bench_drops_references_of_judged_generation():
    result = RunResult("onnxruntime", {"logits": np.zeros(3)})
    case = Case("a", MODEL, Options(), Path(), prefill=result, references=(result,), result=result)
    assert _drop_references(case) is case
    judged = GenerationVerdict(outcome=Outcome.PASS, reason="", rows=(), kl_bound=1.0, error_bound=1.0)
    found = _drop_references(replace(case, generation=judged))
    assert (found.prefill, found.result) == (None, result)
    assert [(one.source, one.outputs) for one in found.references] == [("onnxruntime", {})]


def test_programs_on_different_devices_of_a_board_are_refused() -> None:
    board = choose("unix:/board")
    gpu = use_device(board, "iree", "vulkan")
    with pytest.raises(UsageError, match="different devices of board unix:/board: the default and vulkan"):
        _refuse_different_devices([board, gpu])
    _refuse_different_devices([gpu, gpu, choose("unix:/other")])
    # Simulators are separate processes.
    _refuse_different_devices([choose("sim"), use_device(choose("sim"), "iree", "vulkan")])
