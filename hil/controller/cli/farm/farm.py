"""`hil farm`: a shared queue for many boards and users."""

from __future__ import annotations

from hil.controller.cli.commands import group
from hil.controller.cli.lazy import LazyGroup

# Command -> module in this package and line in `hil farm --help`.
_COMMANDS = {
    "up": ("serve", "Run a farm on this machine: database, gateway, boards."),
    "down": ("serve", "Stop the farm on this machine."),
    "submit": ("submit", "Queue models, a bundle or a suite."),
    "status": ("show", "Show jobs and boards."),
    "watch": ("show", "Show jobs and boards live."),
    "top": ("show", "Show board usage by user, and how long jobs wait."),
    "boards": ("show", "List the boards: state, labels, current jobs."),
    "events": ("show", "List events of boards and jobs, with reasons."),
    "logs": ("result", "Show the output of a job."),
    "result": ("result", "Show the result of a job, and download the files."),
    "cancel": ("result", "Cancel a queued or running job."),
    "lease": ("lease", "Lease a board for exclusive use."),
    "reservations": ("lease", "List and cancel reservations of boards."),
    "drain": ("operate.drain", "Start no new jobs on a board or host."),
    "resume": ("operate.drain", "Make a board or host available to jobs."),
    "forget": ("admin", "Remove a board that no host serves any more."),
    "power": ("operate.power", "Switch the power of a board on or off, or cycle it."),
    "console": ("operate.console", "Print the console of a board."),
    "provision": ("operate.provision", "Write an image to a board, and check the board."),
    "host": ("serve", "Serve the boards of this machine to a farm."),
    "gateway": ("serve", "Run a gateway for users and hosts."),
    "token": ("admin", "Create, list and revoke tokens."),
    "access": ("admin", "Show which boards you or other users may use."),
    "audit": ("admin", "List requests by user, and whether they were allowed."),
    "gc": ("admin", "Delete old results, and unused boards and files."),
    "login": ("operate.login", "Log in to a farm with an account of a login provider."),
    "logout": ("operate.login", "Delete the stored login at a farm."),
    "webhooks": ("operate.webhooks", "List and test webhooks for ended jobs and lost boards."),
    "install": ("operate.install", "Write systemd units, containers and monitoring for a farm."),
    "backup": ("operate.backup", "Write the farm's database and files to an archive."),
    "restore": ("operate.backup", "Restore a farm from an archive."),
}


@group(
    cls=LazyGroup,
    commands={name: (f"hil.controller.cli.farm.{module}", line) for name, (module, line) in _COMMANDS.items()},
    epilog="Example: hil farm up --sim 4",
)
def farm() -> None:
    """Share boards: one queue for many boards and many users (docs/farm.md)."""
