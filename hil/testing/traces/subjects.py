"""What kind of module a class makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hil.testing.traces.model_files import FileSubject, model_files
from hil.testing.traces.runners import Subject


def subject_of(module_class: Callable[[], Any], exported_names: Sequence[str] | None = None) -> Subject:
    """The module class as something that can be traced.

    Raises:
        UsageError: TensorFlow is not installed, or no method is exported.
    """
    if files := model_files(module_class):
        return FileSubject(module_class, files, exported_names)
    from hil.testing.traces.tensorflow_module import TfSubject

    return TfSubject(module_class, exported_names)
