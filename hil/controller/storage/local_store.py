"""The store of an agent on this machine, while that agent does not run."""

from __future__ import annotations

import fcntl
from pathlib import Path

from hil.errors import BoardBusy, StorageError, UsageError


def reset_fence(store: Path) -> None:
    """Let the agent's count of fences begin anew.

    Args:
        store: its folder.

    Raises:
        UsageError: it is no agent's store.
        BoardBusy: the agent runs: it would go on with the count that it knows.
        StorageError: the file cannot be removed.
    """
    try:
        with (store / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (store / "fence").unlink(missing_ok=True)
    except FileNotFoundError as error:
        raise UsageError(f"{store} is no agent's store", hint="name the folder that the agent was given") from error
    except BlockingIOError as error:
        raise BoardBusy(f"the agent of {store} runs", hint="stop it first: it knows its fence") from error
    except OSError as error:
        raise StorageError(f"the fence in {store} cannot be reset: {error.strerror}") from error
