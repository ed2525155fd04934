"""The cases of a job: one a model, or one for each of the sizes that a model's open dimensions are to have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hil.controller.models.dimensions import sizes_of_models
from hil.controller.models.sizes import (
    Range,
    next_combination,
    sized_name,
    sizes_text,
    smallest_failing,
    sweep,
)
from hil.controller.pipeline.model_settings import for_model
from hil.controller.pipeline.options import Job, Options
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.runs import safe_name
from hil.core.results import BOARD_OUTCOMES, Outcome
from hil.core.text import numbered

T = TypeVar("T")

_NO_FAILURE = frozenset({Outcome.PASS, Outcome.SKIP, *BOARD_OUTCOMES})


@dataclass(frozen=True)
class SizedCase:
    """A model with the sizes that it is run with."""

    name: str  # of its case
    model: str  # the name of the model's cases without sizes
    path: Path
    options: Options
    ranges: Mapping[str, Range]  # the dimensions that have ranges

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of those dimensions, in order."""
        return tuple(self.options.dims[name] for name in self.ranges)

    def resized(self, sizes: Mapping[str, int]) -> SizedCase:
        """Return the same model's case with other sizes."""
        dims = {**self.options.dims, **sizes}
        name = sized_name(self.model, {name: dims[name] for name in self.ranges})
        return replace(self, name=safe_name(name), options=replace(self.options, dims=dims))


def sized_cases(job: Job, options: Options, context: RunContext) -> list[SizedCase]:
    """Return the cases of a job's models, in order; a size is given to the models that have its dimension.

    Raises:
        UsageError: no model has a dimension that a size or a range is given for.
    """
    names = numbered([safe_name(path.stem) for path in job.models])
    if len(job.models) == 1 and not (only := for_model(options, job.models[0])).dim_ranges:
        # Importing it checks the dimensions.
        return [SizedCase(names[0], names[0], job.models[0], only, {})]
    given = sizes_of_models(job.models, {**options.dims, **options.dim_ranges}, context, options.function)
    found: list[SizedCase] = []
    for name, path, own in zip(names, job.models, given, strict=True):
        mine = for_model(options, path)
        # Of the sizes for all models those that it has; the project file's for the model are checked as it is read.
        others = {*options.dims, *options.dim_ranges} - own.keys()
        dims = {dim: size for dim, size in mine.dims.items() if dim not in others}
        ranges = {dim: sizes for dim, sizes in mine.dim_ranges.items() if dim not in others}
        chosen = replace(mine, dims=dims, dim_ranges={})
        one = SizedCase(name, name, path, chosen, ranges)
        found += [one.resized(sizes) for sizes in sweep(ranges)]
    return found


class FailureSearch:
    """Looks for the smallest sizes with which each model fails, by the outcomes of its cases."""

    def __init__(self, cases: Sequence[SizedCase]) -> None:
        self._cases = {case.name: case for case in cases if case.ranges}
        self._tried: dict[str, dict[tuple[int, ...], bool]] = {}

    def next_cases(self, outcomes: Mapping[str, Outcome]) -> list[SizedCase]:
        """Return the cases to run next, at most one a model; none where the smallest sizes are known.

        Args:
            outcomes: of every case that has ended, by name.
        """
        self._tried = {}
        for case in self._cases.values():
            if case.name in outcomes:
                self._note(case, outcomes)
        found = []
        for model, tried in self._tried.items():
            one = self._of_model(model)
            while (sizes := next_combination(one.ranges, tried)) is not None:
                case = one.resized(sizes)
                is_new = case.name not in self._cases
                self._cases[case.name] = case
                if case.name in outcomes:  # of a run that is resumed
                    self._note(case, outcomes)
                    continue
                found += [case] if is_new else []
                break
        return found

    def _note(self, case: SizedCase, outcomes: Mapping[str, Outcome]) -> None:
        self._tried.setdefault(case.model, {})[case.sizes] = outcomes[case.name] not in _NO_FAILURE

    def smallest(self, outcomes: Mapping[str, Outcome]) -> Iterator[dict[str, Any]]:
        """Yield the smallest failing sizes of each model that fails: ``model``, ``dims``, ``case``, ``outcome``."""
        for model, tried in self._tried.items():
            if (sizes := smallest_failing(tried)) is not None:
                one = self._of_model(model)
                case = one.resized(dict(zip(one.ranges, sizes, strict=True)))
                dims = {name: case.options.dims[name] for name in case.ranges}
                yield {"model": model, "dims": dims, "case": case.name, "outcome": outcomes[case.name].value}

    def _of_model(self, model: str) -> SizedCase:
        return next(case for case in self._cases.values() if case.model == model)


def failure_text(found: Mapping[str, Any]) -> str:
    """Return a line on the smallest failing sizes of a model."""
    return f"{found['model']}: the smallest failing size is {sizes_text(found['dims'])} ({found['outcome']})"
