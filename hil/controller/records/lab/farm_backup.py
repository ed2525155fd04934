"""Manifest of a farm's backup."""

from __future__ import annotations

from typing import Annotated

from hil.controller.records.base import Count, Record, note

# Version of the archive's format.
BACKUP_FORMAT = 1


class BackupManifest(Record, kw_only=True):
    """Last entry of a backup: content and origin of the archive."""

    format: int
    hil: Annotated[str, note("version of hil that made the backup")]
    created: Annotated[str, note("time of the database's snapshot, in ISO 8601")]
    postgres: Annotated[Count, note("version of the database server, such as 180000")]
    migrations: Annotated[dict[str, list[str]], note("component -> names of applied migrations")]
    jobs: Count
    boards: Count
    tokens: Count
    files: Annotated[Count, note("number of files in the farm's store")]
    bytes: Annotated[Count, note("size of the files in the farm's store")]
    dump: Annotated[str, note("digest of the database's dump")]
    content: Annotated[str, note("digest of the names, sizes and digests of all entries")]
