"""Why no agent can be put on a board."""

from __future__ import annotations

from hil.errors import BoardError

STAGE = "deploy"
COMMAND_HINT = 'the board can be served without an agent: set runtime.kind = "command" in its config'


class NoAgentHere(BoardError):
    """The board cannot run hil's agent, now or ever; without an agent it may still serve."""


class NoPython(NoAgentHere):
    """The board has no Python that the agent can use."""


class NoWheels(NoAgentHere):
    """A package that the agent needs is not published for the board's platform."""
