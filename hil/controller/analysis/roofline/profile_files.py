"""Keep the data of a roofline next to a profile: the peaks of the board, and the work of the model."""

from __future__ import annotations

from pathlib import Path

from hil.controller.analysis.roofline.model_work import COUNTED_FORMATS, count_model
from hil.controller.analysis.roofline.peak_store import PEAKS_FILE, find_peaks, keep_peaks
from hil.controller.models.compiling import CachedCall
from hil.controller.records.base import read_record
from hil.controller.records.measurements.roofline import ModelWork
from hil.controller.storage.runs import write_json
from hil.core.results import Model
from hil.core.timeline import Profile

# File in a profile's directory with the work of the model, if the runtime does not profile operations.
WORK_FILE = "work.json"


def write_roofline_data(profile: Profile, model: Model | None, folder: Path, how: CachedCall) -> None:
    """Write the measured peaks of the board, and the work of a model whose runtime does not profile operations.

    Raises:
        HilError: the operators of the model cannot be read, or a file cannot be written.
    """
    for name in (PEAKS_FILE, WORK_FILE):  # of an older profile
        (folder / name).unlink(missing_ok=True)
    peaks = find_peaks(profile)
    if peaks is not None and peaks.source == "measured":
        keep_peaks(peaks, folder)
    if model is not None and model.format in COUNTED_FORMATS and not any(row.kind == "compute" for row in profile.rows):
        write_json(folder / WORK_FILE, count_model(model, **how).to_json(), option="--profile")


def read_work(folder: Path) -> ModelWork | None:
    """Return the work of a profile's model; None if the profile has operations. Raises UsageError if damaged."""
    return read_record(folder / WORK_FILE, ModelWork) if (folder / WORK_FILE).is_file() else None
