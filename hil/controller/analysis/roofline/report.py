"""Build the report of a profile's roofline, for the terminal, JSON and pages."""

from __future__ import annotations

from pathlib import Path

from hil.controller.analysis.profile.store import read_profile
from hil.controller.analysis.profile.totals import run_times
from hil.controller.analysis.roofline.attainment import Roofline, compute_roofline
from hil.controller.analysis.roofline.peak_store import (
    find_peaks,
    keep_peaks,
    list_differences,
    list_peaks,
    make_data_sheet,
    read_peaks,
)
from hil.controller.analysis.roofline.profile_files import read_work
from hil.controller.records.measurements.roofline import BoardPeaks, RooflineReport
from hil.core.boards import read_board
from hil.core.timeline import Profile
from hil.errors import StorageError, UsageError, did_you_mean

LATEST = "latest"


def build_report(folder: Path, *, by: str, peaks: str = "", keep: bool = False) -> RooflineReport:
    """Return the report of a profile, with all groups of operations.

    Args:
        folder: the profile's directory.
        by: key of :data:`hil.controller.analysis.profile.totals.GROUPS`.
        peaks: ``latest``, the ID of a measurement, a file of ``hil board peak``, or a board config with [peak]. "" is
            the peaks in the directory, otherwise the newest peaks that fit the profile.
        keep: write measured peaks to the directory, for later reports and pages.

    Raises:
        UsageError: the profile, its files or the chosen peaks are missing or damaged.
    """
    profile = read_profile(folder)
    found = choose_peaks(profile, folder, peaks)
    work = read_work(folder)
    # A profile has times, which cannot be compared with instructions.
    usable = None if found is not None and found.clock == "instructions" else found
    report = make_report(profile, found, compute_roofline(profile, usable, by=by, work=work), by)
    if found is not None and found.source == "measured" and keep:
        try:
            keep_peaks(found, folder)
        except StorageError as error:
            report.warnings.append(f"the peaks are not stored with the profile: {error.message}")
    if work is not None and not any(row.kind == "compute" for row in report.rows):
        report.warnings.append("the runtime does not profile operations: the work is that of the model's operators")
    return report


def make_report(profile: Profile, peaks: BoardPeaks | None, roofline: Roofline, by: str) -> RooflineReport:
    """Return the report of a computed roofline."""
    warnings, times = list(roofline.warnings), run_times(profile)
    if times.is_distorted and roofline.rows:
        warnings.append(f"the profiler adds {times.overhead:.0%} to a run: without it, the operations attain more")
    if peaks is None:
        warnings.append(f"no peaks of board {profile.board}: measure them with hil board peak {profile.board}")
    else:
        warnings += list_differences(peaks, profile)
        if peaks.software or (profile.device and "software" in profile.device):
            warnings.append("the device is a GPU that the CPU computes: the roofline is not that of a GPU")
        if peaks.clock == "instructions":
            warnings.append("the peaks are per instruction, but the profile has times: they cannot be compared")
        if peaks.clock == "device" and not profile.device:
            warnings.append("the peaks are device times, but the profile has times of the board's clock")
        warnings += [note for note in peaks.notes if "grade F" in note or "data sheet" in note]
    return RooflineReport(
        run=profile.run,
        model=profile.model,
        board=profile.board,
        runtime=profile.runtime,
        timed_by=profile.device,
        peaks=peaks,
        whole=roofline.whole,
        uncounted=roofline.uncounted,
        by="node" if by == "node" else "type" if by == "type" else "op",
        groups=len(roofline.rows),
        rows=list(roofline.rows),
        warnings=warnings,
    )


def choose_peaks(profile: Profile, folder: Path, wanted: str) -> BoardPeaks | None:
    """Return the chosen peaks; None if nothing was chosen and no peaks fit. Raises UsageError."""
    if not wanted:
        return find_peaks(profile, folder)
    if wanted == LATEST:
        found = find_peaks(profile)
        if found is None:
            raise UsageError(
                f"no peaks of board {profile.board} with {profile.runtime}", hint=f"hil board peak {profile.board}"
            )
        return found
    path = Path(wanted)
    if path.suffix == ".toml":
        config = read_board(path).config
        sheet = make_data_sheet(config.name, config.peak)
        if sheet is None:
            raise UsageError(f"{path} has no table [peak]", hint="add for example memory_gb_s = 12.8")
        return sheet
    if path.suffix == ".json":
        return read_peaks(path)
    stored = list_peaks(profile.board)
    chosen = next((one for one in stored if one.id == wanted), None)
    if chosen is None:
        known = [one.id for one in stored]
        hint = f"{did_you_mean(wanted, known)}known: {', '.join([LATEST, *known])}, a .json file or a board config"
        raise UsageError(f"unknown peaks {wanted!r} of board {profile.board}", hint=hint)
    return chosen
