"""Apply the project file's settings for single models, which file name patterns select."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from hil.controller.models.sizing.sizes import format_range
from hil.controller.pipeline.settings.options import CaseSettings, Kind, RunSettings, Spec, check_value, list_specs
from hil.errors import UsageError, did_you_mean

T = TypeVar("T", bound=CaseSettings)

# Fields of RunSettings with dimension sizes, and with ranges, which are stored separately.
_DIMS, _RANGES = "dims", "dim_ranges"


def _require_mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError
    return value


_TABLE: Kind = ("a table", _require_mapping)


def is_model_key(name: str, spec: Spec) -> bool:
    """Return True if models may have different values of an option. A board uses the same device for all models."""
    return spec.decides and name != "device"


def check_models(values: Any) -> dict[str, dict[str, Any]]:
    """Return validated settings by file name pattern. Raises UsageError if settings are invalid or unknown."""
    specs = {name: spec for name, spec in list_specs(RunSettings).items() if spec.help and is_model_key(name, spec)}
    found: dict[str, dict[str, Any]] = {}
    for pattern, table in check_value("settings of models", values, _TABLE).items():
        own: dict[str, Any] = {}
        for name, value in check_value(f"settings of {pattern}", table, _TABLE).items():
            if name not in specs:
                raise UsageError(
                    f"unknown model setting {name!r}",
                    hint=f"{did_you_mean(name, specs)}known settings: {', '.join(specs)}",
                )
            own[name] = check_value(name, value, specs[name].kind, specs[name].hint)
        found[pattern] = own
    return found


def matches(pattern: str, path: Path) -> bool:
    """Return True if a model's name or path matches a pattern of the project file."""
    return fnmatchcase(path.name, pattern) or fnmatchcase(path.as_posix(), pattern)


def apply_model_settings(settings: T, path: Path) -> T:
    """Return the settings, updated by the project file's settings for a model. Later patterns take precedence.

    Sizes of dimensions are merged by name. Settings that the class does not have are ignored. For example, a suite has
    no runtime, because its flow has the runtime; see :func:`find_model_runtime`.
    """
    if not settings.per_model:
        return settings
    own = {field.name for field in dataclasses.fields(settings)}
    found: dict[str, Any] = {}
    if _DIMS in own:
        ranges = {name: format_range(sizes) for name, sizes in getattr(settings, _RANGES).items()}
        found[_DIMS] = {**getattr(settings, _DIMS), **ranges}
    for pattern, values in check_models(settings.per_model).items():
        if matches(pattern, path):
            dims = {**found.get(_DIMS, {}), **values.get(_DIMS, {})}
            found |= {**values, _DIMS: dims}
    if _DIMS in own:
        # The constructor splits the merged sizes again, because a size may have replaced a range.
        found[_RANGES] = {}
    return dataclasses.replace(settings, per_model={}, **{name: found[name] for name in own & found.keys()})


def find_model_runtime(settings: CaseSettings, path: Path) -> str:
    """Return the runtime in the project file's settings for a model, or "". For settings without a runtime."""
    shared = RunSettings(per_model=settings.per_model)
    return apply_model_settings(shared, path).runtime


def accept_of_file(settings: CaseSettings, path: Path) -> tuple[str, ...]:
    """Return the criteria of tables whose key is a file name without wildcards.

    Tables with patterns do not count, because a pattern may match multiple models.
    """
    tables = (settings.per_model.get(name, {}) for name in dict.fromkeys((path.name, path.as_posix())))
    return tuple(text for table in tables for text in table.get("accept", ()))


def refuse_functions(settings: CaseSettings) -> None:
    """Raise UsageError if settings name a Python function: only the user's settings may run code."""
    texts = [*settings.accept]
    for own in check_models(settings.per_model).values():
        texts += own.get("accept", ())
    if texts:
        from hil.compare.criteria import parse_accept

        parse_accept(texts)
