"""Which cases a job with sizes of open dimensions has, and how the smallest failing sizes are found."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import TensorProto, helper
from support.models import save_model

from hil.controller.models.generation.spec import find_prompt, read_spec
from hil.controller.pipeline.settings.options import Job
from hil.controller.records.run import SmallestFailing
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.sized_cases import FailureSearch, SizedCase, format_failure, list_sized_cases
from hil.core.results import Outcome
from hil.errors import UsageError


@pytest.fixture(scope="module")
def context(isolated: Isolated, tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    return RunContext(Cache(tmp_path_factory.mktemp("cache")), isolated)


def save_relu(path: Path, *shape: int | str) -> Path:
    path.parent.mkdir(exist_ok=True)
    sides = [[(name, TensorProto.FLOAT, shape)] for name in "xy"]
    return save_model(path, [helper.make_node("Relu", ["x"], ["y"])], *sides)


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, ...]:
    return save_relu(tmp_path / "seq.onnx", "S", 4), save_relu(tmp_path / "batch.onnx", "N", 4)


def planned(models: tuple[Path, ...], context: RunContext, **dims: int | str) -> list[SizedCase]:
    job = Job(models=models, dims=dims)  # type: ignore[arg-type]
    return list_sized_cases(job, job.make_options(), context)


def test_size_applies_to_models_with_dimension(models, context):
    found = planned(models, context, S=3, N=2)
    assert [(one.name, dict(one.options.dims)) for one in found] == [("seq", {"S": 3}), ("batch", {"N": 2})]


def test_range_makes_case_of_every_edge(models, context):
    found = planned(models, context, S="1..3", N=2)
    assert [(one.name, dict(one.options.dims)) for one in found] == [
        ("seq_S-1", {"S": 1}),
        ("seq_S-2", {"S": 2}),
        ("seq_S-3", {"S": 3}),
        ("batch", {"N": 2}),
    ]
    assert not any(one.options.dim_ranges for one in found)


def test_project_file_size_applies_to_matching_model(models, context):
    job = Job(models=models, dims={"S": 3}, per_model={"batch.*": {"dims": {"N": 2}, "rtol": 0.5}})
    found = list_sized_cases(job, job.make_options(), context)
    assert [(one.name, dict(one.options.dims)) for one in found] == [("seq", {"S": 3}), ("batch", {"N": 2})]
    assert [one.options.rtol for one in found] == [None, 0.5]
    job = Job(models=models[1:], per_model={"batch.*": {"dims": {"N": "1..2"}}})
    assert [one.name for one in list_sized_cases(job, job.make_options(), context)] == ["batch_N-1", "batch_N-2"]


def test_project_file_size_extends_general_sizes(models, context, tmp_path):
    both = save_relu(tmp_path / "both.onnx", "N", "S")
    job = Job(models=(*models, both), dims={"S": 3, "N": 1}, per_model={"both.*": {"dims": {"N": 2}}})
    found = [dict(one.options.dims) for one in list_sized_cases(job, job.make_options(), context)]
    assert found == [{"S": 3}, {"N": 1}, {"S": 3, "N": 2}]


@pytest.mark.parametrize("size", [3, "1..3"])
def test_unknown_dimension_error_names_models(models, context, size):
    with pytest.raises(UsageError, match=r"--dim Q: dimension not found in .*seq.onnx, .*batch.onnx"):
        planned(models, context, Q=size)
    with pytest.raises(UsageError, match=r"--dim Q: dimension not found in [^,]*seq.onnx\n"):
        planned(models[:1], context, Q="1..2")


def test_models_with_same_name_have_separate_dimensions(tmp_path, context):
    paths = save_relu(tmp_path / "a" / "net.onnx", "S"), save_relu(tmp_path / "b" / "net.onnx", "N")
    found = planned(paths, context, S=1, N="2..3")
    assert [one.name for one in found] == ["net", "net-2_N-2", "net-2_N-3"]


def searched(models: tuple[Path, ...], context: RunContext, limit: int, wrong: Outcome) -> tuple[list[str], list]:
    """Run the search on models that fail from a size on; return the added cases and the smallest failures."""
    cases = planned(models, context, S="1..512", N=1)
    search, outcomes, added = FailureSearch(cases), {}, []
    while cases:
        outcomes |= {one.name: wrong if sum(one.sizes.values()) >= limit else Outcome.PASS for one in cases}
        cases = search.choose_next_cases(outcomes)
        added += [one.name for one in cases]
    return added, list(search.iter_smallest(outcomes))


@pytest.mark.parametrize("wrong", [Outcome.FAIL, Outcome.BLIND, Outcome.COMPILE_ERROR, Outcome.RUN_CRASH])
def test_search_finds_smallest_failing_size(models, context, wrong):
    added, (found,) = searched(models, context, 37, wrong)
    assert found == SmallestFailing(model="seq", dims={"S": 37}, case="seq_S-37", outcome=wrong)
    assert "seq_S-36" in added and len(added) < 8
    assert format_failure(found) == f"seq: the smallest failing size is S=37 ({wrong.value})"


@pytest.mark.parametrize("wrong", [Outcome.BOARD_LOST, Outcome.PASS])
def test_search_ends_without_failing_size(models, context, wrong):
    assert searched(models, context, 37, wrong) == ([], [])


def test_search_continues_from_earlier_outcomes(models, context):
    cases = planned(models[:1], context, S="1..512")
    outcomes = {one.name: Outcome.FAIL if one.sizes["S"] >= 37 else Outcome.PASS for one in cases}
    (first,) = FailureSearch(cases).choose_next_cases(outcomes)
    (second,) = FailureSearch(cases).choose_next_cases({**outcomes, first.name: Outcome.FAIL})
    assert (first.name, second.name) == ("seq_S-40", "seq_S-28")


def test_search_ends_without_outcome_of_case(models, context):
    cases = planned(models[:1], context, S="1..512")
    outcomes = {one.name: Outcome.FAIL if one.sizes["S"] >= 37 else Outcome.PASS for one in cases}
    search = FailureSearch(cases)
    assert search.choose_next_cases(outcomes) and not search.choose_next_cases(outcomes)


def save_prompts(folder: Path, lengths: str) -> Path:
    path = folder / "prompts.toml"
    prompts = f'[[prompt]]\nname = "a"\ntokens = {list(range(64))}\n[[prompt]]\nname = "b"\ntokens = [1]\n'
    path.write_text(f"lengths = {lengths}\n{prompts}")
    return path


def test_lengths_make_cases_of_first_prompt(models, context, tmp_path):
    job = Job(models=models[:1], generate=save_prompts(tmp_path, "[3, 1]"))
    found = list_sized_cases(job, job.make_options(), context)
    assert [one.name for one in found] == ["seq-a", "seq-a-1", "seq-a-3", "seq-b"]
    assert [one.options.prompt for one in found] == ["a", "a-1", "a-3", "b"]


def test_search_finds_smallest_failing_length(models, context, tmp_path):
    path = save_prompts(tmp_path, '"1..64"')
    job = Job(models=models[:1], generate=path)
    cases = list_sized_cases(job, job.make_options(), context)
    search, outcomes = FailureSearch(cases), {}
    while cases:
        sizes = {one.name: len(find_prompt(read_spec(path), one.options.prompt).tokens) for one in cases}
        outcomes |= {name: Outcome.FAIL if size >= 37 else Outcome.PASS for name, size in sizes.items()}
        cases = search.choose_next_cases(outcomes)
    (found,) = search.iter_smallest(outcomes)
    assert (found.case, found.dims, found.outcome) == ("seq-a-37", {"prompt tokens": 37}, Outcome.FAIL)
