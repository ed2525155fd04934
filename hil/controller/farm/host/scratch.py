"""Temporary files of a worker: in a folder of its own, so that whoever is killed leaves none for long."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hil.controller.farm.host.duty import emptied
from hil.controller.farm.host.posts import Post, Site
from hil.core.scratch import remove_tree


@contextlib.contextmanager
def scratch_folder(post: Post, site: Site) -> Iterator[None]:
    """Everything temporary of this process, and of what it starts, goes to the board's own folder.

    What a former worker of the board left there goes first. The path is short: sockets are made there too.
    """
    mark = hashlib.sha256(post.name.encode()).hexdigest()[:8]
    folder = str(emptied(site.sockets / mark))
    before = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        tempfile.tempdir = before[0]
        os.environ.pop("TMPDIR")
        if before[1] is not None:
            os.environ["TMPDIR"] = before[1]
        remove_tree(Path(folder))
