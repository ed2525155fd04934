"""Meter of a package. Its errors are problems of the samples, so that they never change the outcome of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hil.controller.devices.metering.samples import Meter, PowerSamples
from hil.core.field_types import is_a
from hil.core.guarded import guard_plugin
from hil.errors import BoardUnfit, HilError, UsageError

_DTYPES: dict[str, type[np.generic]] = {
    "times_ns": np.int64,
    "watts": np.float64,
    "joules": np.float64,
    "gpio": np.bool_,
}


class PackageMeter:
    """Adapter of a package's meter.

    Args:
        who: the package, for errors.
    """

    def __init__(self, meter: Meter, who: str) -> None:
        self._meter = meter
        self._who = who
        self._problem = ""

    def start(self) -> None:
        """Start to sample. Raises UsageError or BoardUnfit."""
        with guard_plugin(f"start() of {self._who}", BoardUnfit, UsageError, BoardUnfit):
            self._meter.start()

    def read(self) -> PowerSamples:
        """Return the samples since the start, as arrays. An error of the package is a problem of the samples."""
        try:
            with guard_plugin(f"read() of {self._who}", BoardUnfit):
                found = self._meter.read()
                if isinstance(found, PowerSamples):
                    arrays: dict[str, Any] = {name: _make_array(name, getattr(found, name)) for name in _DTYPES}
                    found = replace(found, **arrays, problem=found.problem or self._problem)
                is_a(PowerSamples)(found)
                return found
        except HilError as error:
            return PowerSamples(problem=error.message)

    def stop(self) -> None:
        """Stop to sample. :meth:`read` reports an error of the package."""
        try:
            with guard_plugin(f"stop() of {self._who}", BoardUnfit):
                self._meter.stop()
        except HilError as error:
            self._problem = error.message


def _make_array(name: str, values: Any) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.asarray(values, _DTYPES[name])
    if array.ndim != 1:
        raise TypeError(f"{name} has {array.ndim} dimensions, expected 1")
    return array
