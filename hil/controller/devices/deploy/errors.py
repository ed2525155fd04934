"""Why no agent can be put on a board."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hil.errors import BoardError, StorageError

STAGE = "deploy"
COMMAND_HINT = 'the board can be served without an agent: set runtime.kind = "command" in its config'


@contextlib.contextmanager
def at_home() -> Iterator[None]:
    """This machine's own troubles with files, which are none of the board's.

    Raises:
        StorageError: in place of any OSError.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the agent could not be made ready on this machine: {error}", hint="is its disk full? TMPDIR names another"
        ) from error


class NoAgentHere(BoardError):
    """The board cannot run hil's agent, now or ever; without an agent it may still serve."""


class NoPython(NoAgentHere):
    """The board has no Python that the agent can use."""


class NoWheels(NoAgentHere):
    """A package that the agent needs is not published for the board's platform."""
