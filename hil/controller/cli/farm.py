"""`hil farm`: one queue for many boards and many users."""

from __future__ import annotations

from hil.controller.cli.commands import group
from hil.controller.cli.lazy import LazyGroup

# Command -> its module (below hil.controller.cli) and its line in `hil farm --help`.
_COMMANDS = {
    "up": ("farm_serve", "Run a farm on this machine: database, gateway, boards."),
    "down": ("farm_serve", "Stop the farm that runs on this machine."),
    "submit": ("farm_submit", "Queue models, a bundle or a suite."),
    "status": ("farm_show", "Show the jobs and the boards."),
    "watch": ("farm_show", "Show them live."),
    "top": ("farm_show", "Show who uses the boards, and how long jobs wait."),
    "boards": ("farm_show", "List the boards: state, labels, what runs on them."),
    "events": ("farm_show", "List what happened to boards and jobs, and why."),
    "logs": ("farm_result", "Show what a job prints."),
    "result": ("farm_result", "Show how a job ended, and fetch what it made."),
    "cancel": ("farm_result", "End a job, or take it out of the queue."),
    "lease": ("farm_lease", "Have a board to yourself for a while."),
    "drain": ("farm_admin", "Let nothing new begin on a board."),
    "resume": ("farm_admin", "Give a board to jobs again."),
    "forget": ("farm_admin", "Leave out a board that is gone for good."),
    "host": ("farm_serve", "Serve the boards of this machine to a farm."),
    "gateway": ("farm_serve", "Run a gateway: what users and hosts talk to."),
    "token": ("farm_admin", "Make, list and revoke tokens."),
    "audit": ("farm_admin", "List who asked for what, and whether it was allowed."),
    "gc": ("farm_admin", "Delete old results, and boards and files that are not needed any more."),
}


@group(
    cls=LazyGroup,
    commands={name: (f"hil.controller.cli.{module}", line) for name, (module, line) in _COMMANDS.items()},
    epilog="Example: hil farm up --sim 4",
)
def farm() -> None:
    """Share boards: one queue for many boards and many users (docs/farm.md)."""
