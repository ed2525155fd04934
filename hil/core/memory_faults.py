"""Attribute an out-of-memory kill by Linux to the program or the board."""

from __future__ import annotations

from hil.errors import BoardUnfit, HilError, RunCrashed

# If a killed program used at least this share of the memory, the program is too large for the board, even without other
# processes.
_OWN_SHARE = 0.75


def make_memory_error(peak_bytes: int, total_bytes: int) -> HilError:
    """Return the error for a program that Linux killed for lack of memory.

    Args:
        peak_bytes: the program's peak memory.
        total_bytes: the board's memory for programs.
    """
    if peak_bytes >= _OWN_SHARE * total_bytes:
        return RunCrashed(
            f"out of memory: the program used {peak_bytes} of the board's {total_bytes} bytes",
            hint="use a smaller model or batch, or a board with more memory",
        )
    return BoardUnfit(
        f"out of memory: Linux killed the program at {peak_bytes} bytes; "
        f"other processes use the rest of the board's {total_bytes} bytes",
        hint="stop other processes on the board",
    )
