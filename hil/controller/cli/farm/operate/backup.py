"""`hil farm backup` and `hil farm restore`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.options import FILE, combine_options, json_option
from hil.controller.cli.screen import answer, print_message
from hil.controller.records.commands.farm import FarmBackup, RestoredFarm
from hil.errors import EXIT_BOARD, EXIT_OK

if TYPE_CHECKING:
    from hil.controller.farm.backup.farm_backup import FarmPlace

_place_options = combine_options(
    click.option(
        "--db", default="", metavar="URL", help="PostgreSQL URL (default: HIL_FARM_DB, or the local database)."
    ),
    click.option(
        "--artifacts", default="", metavar="DIR|URL", help="File storage (default: HIL_FARM_ARTIFACTS, or the home)."
    ),
)


@make_command(epilog="Example: hil farm backup farm.tar")
@click.argument("file", type=FILE)
@_place_options
@click.option("--force", is_flag=True, help="Replace an existing FILE.")
@json_option
def backup(file: Path, db: str, artifacts: str, force: bool, as_json: bool) -> int:
    """Write the farm's database, stored files, settings and history to FILE, while jobs run.

    FILE is a tar archive that only you can read. The exit code is 4 if the store lacks files of jobs: the archive then
    contains everything else. The command needs the database and the file storage, so run it on a gateway's machine.
    """
    from hil.controller.farm.local.local_farm import need_packages

    need_packages()
    from hil.controller.farm.backup.farm_backup import check_target, write_backup

    check_target(file, force=force)
    done = write_backup(_find_place(db, artifacts), file, print_message)
    made = done.manifest
    for digest in done.missing:
        print_message(f"hil: missing or damaged file in the farm's store: {digest}")
    document = FarmBackup(
        file=str(file),
        size=done.size,
        created=made.created,
        jobs=made.jobs,
        boards=made.boards,
        tokens=made.tokens,
        files=made.files,
        missing=done.missing,
        exit_code=EXIT_BOARD if done.missing else EXIT_OK,
    )
    text = f"{file}: {made.jobs:,} jobs, {made.boards:,} boards, {made.files:,} files, {done.size:,} bytes"
    return answer(as_json, document, text)


@make_command(
    epilog="""\b
Examples:
  hil farm restore farm.tar --dry-run
  env HIL_FARM_HOME=/srv/farm hil farm restore farm.tar"""
)
@click.argument("file", type=FILE)
@_place_options
@click.option("--force", is_flag=True, help="Replace a farm that has jobs, boards or tokens.")
@click.option("--dry-run", is_flag=True, help="Only verify FILE, and that the farm can be replaced.")
@json_option
def restore(file: Path, db: str, artifacts: str, force: bool, dry_run: bool, as_json: bool) -> int:
    """Restore a farm from FILE, which hil farm backup wrote. The farm must be stopped.

    hil verifies the whole FILE first. After an error, the old farm is unchanged. Jobs that ran at the time of the
    backup run again, except commands with a single attempt. All tokens of the backup are valid again. Restore only
    a FILE that you trust: the database runs its content.
    """
    from hil.controller.farm.local.local_farm import need_packages

    need_packages()
    from hil.controller.farm.backup.farm_restore import restore_farm

    place = _find_place(db, artifacts)
    made = restore_farm(place, file, print_message, force=force, dry_run=dry_run)
    document = RestoredFarm(
        file=str(file),
        home=str(place.home),
        dry_run=dry_run,
        created=made.created,
        jobs=made.jobs,
        boards=made.boards,
        tokens=made.tokens,
        files=made.files,
    )
    counts = f"{made.jobs:,} jobs, {made.boards:,} boards, {made.tokens:,} tokens, {made.files:,} files"
    text = f"would restore {counts}" if dry_run else f"restored {counts}; start the farm: hil farm up"
    return answer(as_json, document, text)


def _find_place(db: str, artifacts: str) -> FarmPlace:
    """Return the place of the farm's data, from the options or the environment."""
    from hil.controller.farm.backup.farm_backup import FarmPlace
    from hil.controller.farm.gateway.artifacts import ARTIFACTS_VARIABLE
    from hil.controller.farm.paths import DB_VARIABLE, get_farm_home

    home = get_farm_home()
    return FarmPlace(
        home,
        db or os.environ.get(DB_VARIABLE, ""),
        artifacts or os.environ.get(ARTIFACTS_VARIABLE, "") or str(home / "artifacts"),
    )
