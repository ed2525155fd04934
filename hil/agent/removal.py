"""Folders that a program could write into, removed whatever it left in them."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


def remove_tree(folder: Path) -> None:
    """Remove a folder with all that is in it, as far as this user may.

    No path grows longer and no call deeper than the folder's own level, for a program may nest folders by the thousand:
    what lies in a folder below is moved up. Links are removed and not followed.
    """
    with contextlib.suppress(OSError):
        while _emptied(folder, folder):
            pass
        folder.rmdir()


def _emptied(folder: Path, top: Path) -> bool:
    """Remove a folder's files and move its folders to the top, where they are removed; whether anything was done."""
    done = False
    folder.chmod(0o700)
    with os.scandir(folder) as found:
        for entry in found:
            with contextlib.suppress(OSError):
                path = Path(entry.path)
                if not entry.is_dir(follow_symlinks=False):
                    path.unlink()
                elif folder == top:
                    done |= _emptied(path, top)
                    path.rmdir()
                else:
                    path.chmod(0o700)  # one that may not be written cannot be moved: its `..` would change
                    path.rename(top / uuid.uuid4().hex)
                done = True
    return done
