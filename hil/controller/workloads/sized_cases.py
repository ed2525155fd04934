"""Cases of a job: a case per model, per size of a model's dynamic dimensions, or per prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from hil.controller.models.generation.spec import read_spec
from hil.controller.models.sizing.dimensions import choose_model_sizes
from hil.controller.models.sizing.sizes import (
    Range,
    choose_next_combination,
    find_smallest_failing,
    format_sized_name,
    format_sizes,
    sweep,
)
from hil.controller.pipeline.settings.model_settings import apply_model_settings
from hil.controller.pipeline.settings.options import Job, Options
from hil.controller.records.run import SmallestFailing
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.runs import make_safe_name
from hil.core.results import BOARD_OUTCOMES, Outcome
from hil.core.text import make_names_unique

T = TypeVar("T")

_NO_FAILURE = frozenset({Outcome.PASS, Outcome.SKIP, *BOARD_OUTCOMES})
# Key for a prompt's length among the names of dimensions, which never contain a space.
_LENGTH = "prompt tokens"


@dataclass(frozen=True)
class SizedCase:
    """A model with the sizes for the dynamic dimensions, and for the length of its prompt."""

    name: str  # case name
    model: str  # case name without sizes
    path: Path
    options: Options
    ranges: Mapping[str, Range]  # dimensions with a range
    sizes: Mapping[str, int] = field(default_factory=dict)  # dimension with a range -> size
    prompt: str = ""  # name of the whole prompt, with --generate

    def resize(self, sizes: Mapping[str, int]) -> SizedCase:
        """Return a case of the same model with other sizes."""
        mine = {name: {**self.sizes, **sizes}[name] for name in self.ranges}
        dims = {name: size for name, size in mine.items() if name != _LENGTH}
        options, name = replace(self.options, dims={**self.options.dims, **dims}), format_sized_name(self.model, dims)
        if _LENGTH in mine and mine[_LENGTH] < self.ranges[_LENGTH][1]:
            options = replace(options, prompt=f"{self.prompt}-{mine[_LENGTH]}")
            name = f"{name}-{mine[_LENGTH]}"
        elif _LENGTH in mine:
            options = replace(options, prompt=self.prompt)
        return replace(self, name=make_safe_name(name), options=options, sizes=mine)


def list_sized_cases(job: Job, options: Options, context: RunContext) -> list[SizedCase]:
    """Return the cases of a job's models, in order. A size applies to all models that have the dimension.

    Raises:
        UsageError: no model has a dimension with the name of a given size or range.
    """
    names = make_names_unique([make_safe_name(path.stem) for path in job.models])
    if len(job.models) == 1 and not (only := apply_model_settings(options, job.models[0])).dim_ranges:
        # The model's import checks the dimensions.
        return _split_prompts([SizedCase(names[0], names[0], job.models[0], only, {})])
    given = choose_model_sizes(job.models, {**options.dims, **options.dim_ranges}, context, options.function)
    found: list[SizedCase] = []
    for name, path, own in zip(names, job.models, given, strict=True):
        mine = apply_model_settings(options, path)
        # Drop sizes of dimensions that this model does not have. Sizes from the project file are checked when hil reads
        # the file.
        others = {*options.dims, *options.dim_ranges} - own.keys()
        dims = {dim: size for dim, size in mine.dims.items() if dim not in others}
        ranges = {dim: sizes for dim, sizes in mine.dim_ranges.items() if dim not in others}
        chosen = replace(mine, dims=dims, dim_ranges={})
        one = SizedCase(name, name, path, chosen, ranges)
        found += [one.resize(sizes) for sizes in sweep(ranges)]
    return _split_prompts(found)


def _split_prompts(cases: Sequence[SizedCase]) -> list[SizedCase]:
    """Return a case per prompt for every case with ``--generate``. Raises UsageError for an invalid specification."""
    found: list[SizedCase] = []
    for case in cases:
        path = case.options.generate
        if path is None:
            found.append(case)
            continue
        spec = read_spec(path)
        for number, prompt in enumerate(spec.prompt):
            # Treat each prompt as a separate model, so that the smallest failing sizes are found for each prompt.
            model, options = make_safe_name(f"{case.model}-{prompt.name}"), replace(case.options, prompt=prompt.name)
            one, sizes = replace(case, model=model, options=options, prompt=prompt.name), [case.sizes]
            if spec.lengths and not number:
                whole = len(prompt.tokens)
                one = replace(one, ranges={**case.ranges, _LENGTH: (1, whole)})
                sizes = [{**case.sizes, _LENGTH: int(size)} for size in (whole, *spec.lengths)]
            found += [one.resize(size) for size in sizes]
    names = make_names_unique([case.name for case in found])
    return [replace(case, name=name) for case, name in zip(found, names, strict=True)]


class FailureSearch:
    """Search for the smallest failing sizes of the models, driven by case outcomes."""

    def __init__(self, cases: Sequence[SizedCase]) -> None:
        self._cases = {case.name: case for case in cases if case.ranges}
        self._tried: dict[str, dict[tuple[int, ...], bool]] = {}

    def choose_next_cases(self, outcomes: Mapping[str, Outcome]) -> list[SizedCase]:
        """Return the cases to run next, at most one per model; empty when the smallest sizes are known.

        Args:
            outcomes: outcomes of finished cases, by name.
        """
        self._tried = {}
        for case in self._cases.values():
            if case.name in outcomes:
                self._note(case, outcomes)
        found = []
        for model, tried in self._tried.items():
            one = self._get_case(model)
            while (sizes := choose_next_combination(one.ranges, tried)) is not None:
                case = one.resize(sizes)
                is_new = case.name not in self._cases
                self._cases[case.name] = case
                if case.name in outcomes:  # from a resumed run
                    self._note(case, outcomes)
                    continue
                found += [case] if is_new else []
                break
        return found

    def _note(self, case: SizedCase, outcomes: Mapping[str, Outcome]) -> None:
        self._tried.setdefault(case.model, {})[tuple(case.sizes.values())] = outcomes[case.name] not in _NO_FAILURE

    def iter_smallest(self, outcomes: Mapping[str, Outcome]) -> Iterator[SmallestFailing]:
        """Yield the smallest failing sizes of the failing models."""
        for model, tried in self._tried.items():
            if (sizes := find_smallest_failing(tried)) is not None:
                one = self._get_case(model)
                case = one.resize(dict(zip(one.ranges, sizes, strict=True)))
                yield SmallestFailing(model=model, dims=dict(case.sizes), case=case.name, outcome=outcomes[case.name])

    def _get_case(self, model: str) -> SizedCase:
        return next(case for case in self._cases.values() if case.model == model)


def format_failure(found: SmallestFailing) -> str:
    """Return a line that describes a model's smallest failing sizes."""
    return f"{found.model}: the smallest failing size is {format_sizes(found.dims)} ({found.outcome.value})"
