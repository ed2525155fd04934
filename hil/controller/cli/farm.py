"""`hil farm`: a shared queue for many boards and users."""

from __future__ import annotations

from hil.controller.cli.commands import group
from hil.controller.cli.lazy import LazyGroup

# Command -> module in hil.controller.cli and line in `hil farm --help`.
_COMMANDS = {
    "up": ("farm_serve", "Run a farm on this machine: database, gateway, boards."),
    "down": ("farm_serve", "Stop the farm on this machine."),
    "submit": ("farm_submit", "Queue models, a bundle or a suite."),
    "status": ("farm_show", "Show jobs and boards."),
    "watch": ("farm_show", "Show jobs and boards live."),
    "top": ("farm_show", "Show board usage by user, and how long jobs wait."),
    "boards": ("farm_show", "List the boards: state, labels, current jobs."),
    "events": ("farm_show", "List events of boards and jobs, with reasons."),
    "logs": ("farm_result", "Show the output of a job."),
    "result": ("farm_result", "Show the result of a job, and download the files."),
    "cancel": ("farm_result", "Cancel a queued or running job."),
    "lease": ("farm_lease", "Lease a board for exclusive use."),
    "drain": ("farm_admin", "Start no new jobs on a board."),
    "resume": ("farm_admin", "Make a board available to jobs."),
    "forget": ("farm_admin", "Remove a board that no host serves any more."),
    "host": ("farm_serve", "Serve the boards of this machine to a farm."),
    "gateway": ("farm_serve", "Run a gateway for users and hosts."),
    "token": ("farm_admin", "Create, list and revoke tokens."),
    "audit": ("farm_admin", "List requests by user, and whether they were allowed."),
    "gc": ("farm_admin", "Delete old results, and unused boards and files."),
}


@group(
    cls=LazyGroup,
    commands={name: (f"hil.controller.cli.{module}", line) for name, (module, line) in _COMMANDS.items()},
    epilog="Example: hil farm up --sim 4",
)
def farm() -> None:
    """Share boards: one queue for many boards and many users (docs/farm.md)."""
