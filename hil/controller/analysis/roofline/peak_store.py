"""Store the peaks of boards in the user's data directory, and find the peaks for a profile.

A directory per board contains a file per measurement. A new measurement does not replace an older one, because the
older one may belong to another stack.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from hil.controller.records.base import read_record
from hil.controller.records.measurements.roofline import BoardPeaks, PeakValue
from hil.controller.records.stack import map_versions
from hil.controller.storage.runs import convert_write_errors, make_safe_name, write_json
from hil.core.boards import find_board, read_board
from hil.core.peak_config import PeakConfig
from hil.core.timeline import Profile
from hil.errors import UsageError

# File in a profile's directory with the peaks for this profile.
PEAKS_FILE = "peaks.json"
_MAX_FILE_BYTES = 8 << 20
# Number of stored measurements per board. Older files are deleted.
_KEPT = 50
# Parts of a stack that change the speed of a board.
_STACK_PARTS = ("kernel", "firmware", "driver", "governor", "ddr clock", "accelerator clock")


def get_peak_folder() -> Path:
    """Return the directory of all measurements."""
    import platformdirs

    return Path(platformdirs.user_data_dir("hil")) / "peaks"


def store_peaks(peaks: BoardPeaks) -> Path:
    """Store a measurement and set its id. Return the file.

    Raises:
        StorageError: the directory cannot be written.
    """
    folder = get_peak_folder() / make_safe_name(peaks.board)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(peaks.created))
    with convert_write_errors(folder, ""):
        folder.mkdir(parents=True, exist_ok=True)
        number, path = 1, folder / f"{stamp}.json"
        while path.exists():
            number += 1
            path = folder / f"{stamp}-{number}.json"
        peaks.id = path.stem
        write_json(path, peaks.to_json(), option="")
        for old in sorted(folder.glob("*.json"))[:-_KEPT]:
            old.unlink(missing_ok=True)
    return path


def list_peaks(board: str) -> list[BoardPeaks]:
    """Return the stored measurements of a board, newest first. Files that cannot be read are skipped."""
    found = []
    for path in sorted((get_peak_folder() / make_safe_name(board)).glob("*.json"), reverse=True):
        with contextlib.suppress(UsageError):
            peaks = read_peaks(path)
            if peaks.board == board:
                found.append(peaks)
    return sorted(found, key=lambda one: (-one.created, one.id))


def read_peaks(path: Path) -> BoardPeaks:
    """Read a stored measurement. Raises UsageError if the file is missing, damaged or from a newer hil."""
    return read_record(path, BoardPeaks, _MAX_FILE_BYTES)


def keep_peaks(peaks: BoardPeaks, folder: Path) -> None:
    """Write the peaks for a profile to the profile's directory. Raises StorageError."""
    write_json(folder / PEAKS_FILE, peaks.to_json(), option="")


def find_peaks(profile: Profile, folder: Path | None = None) -> BoardPeaks | None:
    """Return the peaks for a profile; None if there are none.

    The order is: the peaks in the profile's directory, the newest measurement with the same runtime, version, device
    and compiler flags, the newest measurement with the same runtime, version and device, the newest measurement with
    the same runtime and device, and the values of a data sheet in the board config.

    Args:
        folder: the profile's directory, if any.

    Raises:
        UsageError: the file in the profile's directory is damaged.
    """
    if folder is not None and (folder / PEAKS_FILE).is_file():
        return read_peaks(folder / PEAKS_FILE)
    stored = list_peaks(profile.board)
    same = [one for one in stored if is_for_runtime(one, profile.runtime)]
    best = [one for one in same if set(one.flags) == set(profile.flags)]
    similar = [one for one in stored if is_for_device(one, profile.runtime)]
    return next(iter([*best, *same, *similar]), None) or find_data_sheet(profile.board)


def is_for_runtime(peaks: BoardPeaks, runtime: str) -> bool:
    """Return whether peaks belong to a runtime, version and device, as in a profile."""
    label = " ".join(filter(None, (peaks.runtime, peaks.runtime_version, peaks.device)))
    return runtime == label or runtime.startswith(f"{label} ")


def is_for_device(peaks: BoardPeaks, runtime: str) -> bool:
    """Return whether peaks belong to a runtime and device, with any version of the runtime."""
    words = runtime.split()
    return words[:1] == [peaks.runtime] and (peaks.device in words if peaks.device else len(words) <= 2)


def find_data_sheet(board: str) -> BoardPeaks | None:
    """Return the peaks in the table [peak] of a board's config; None without a config or without the table."""
    try:
        config = read_board(find_board(board)).config
    except UsageError:
        return None
    return make_data_sheet(config.name, config.peak)


def make_data_sheet(board: str, config: PeakConfig) -> BoardPeaks | None:
    """Return the peaks of a data sheet; None if the config has no value."""
    values: Mapping[str, float] = {
        "f32": config.f32_gflops,
        "f16": config.f16_gflops,
        "int8": config.int8_gops,
    }
    compute = {name: PeakValue(rate=value * 1e9) for name, value in values.items() if value}
    memory = PeakValue(rate=config.memory_gb_s * 1e9) if config.memory_gb_s else None
    if not compute and memory is None:
        return None
    return BoardPeaks(
        schema=1,
        id="",
        source="data sheet",
        created=0.0,
        board=board,
        runtime="",
        runtime_version="",
        device="",
        compute=compute,
        memory=memory,
        notes=["the peaks are values of a data sheet in the board's config: no program reaches them"],
    )


def list_differences(peaks: BoardPeaks, profile: Profile) -> list[str]:
    """Return how the conditions of a profile differ from the conditions of the peaks, one text per difference."""
    if peaks.source == "data sheet":
        return []
    found = []
    if not is_for_runtime(peaks, profile.runtime):
        found.append(
            f"the peaks were measured with {peaks.runtime} {peaks.runtime_version}, the profile with {profile.runtime}"
        )
    if profile.flags:  # unknown in profiles of earlier versions
        sides = (("peaks", peaks.flags, profile.flags), ("profile", profile.flags, peaks.flags))
        found += [
            f"only the {name} used the compiler flags {' '.join(flags)}"
            for name, own, other in sides
            if (flags := [flag for flag in own if flag not in other])
        ]
    before, stack = map_versions(peaks.stack), profile.stack
    found += [
        f"{name} of the peaks: {before[name]}, of the profile: {stack[name]}"
        for name in _shared_parts(before, stack)
        if before[name] != stack[name]
    ]
    return found


def _shared_parts(a: Mapping[str, str], b: Mapping[str, str]) -> Iterable[str]:
    """Return the parts that change the speed and that are known on both sides."""
    return [name for name in _STACK_PARTS if a.get(name) and b.get(name)]
