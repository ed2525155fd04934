"""State of the source tree for entries of the history."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hil.controller.records.measurements.history import SourceState
from hil.controller.records.outputs import Origin
from hil.controller.storage.sources.origin import find_origin, is_tree_dirty


@dataclass(frozen=True)
class SourceOptions:
    """Source state given by the user. Empty values are taken from the run, or else from the working tree."""

    commit: str = ""
    branch: str = ""

    @functools.cached_property
    def _tree(self) -> Origin:
        return find_origin()

    @functools.cached_property
    def _is_dirty(self) -> bool | None:
        return is_tree_dirty()

    def state_of(self, origin: Origin | None) -> SourceState:
        """Return the source state of a run.

        Uncommitted changes can be checked only in the current working tree. For a run of another commit, they are
        unknown.

        Args:
            origin: origin of the run, or None.
        """
        tree = self._tree
        commit = self.commit or (origin.commit if origin else "") or tree.commit
        branch = self.branch or (origin.branch if origin else "") or (tree.branch if commit == tree.commit else "")
        is_current = bool(commit) and commit == tree.commit
        labels = (origin or tree).labels
        return SourceState(commit=commit, branch=branch, dirty=self._is_dirty if is_current else None, labels=labels)


def shorten_model(path: str) -> str:
    """Return a model's path relative to the repository or working directory, or else its name.

    The series of a model is therefore the same in every checkout and subdirectory.
    """
    here = Path.cwd()
    root = next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)
    # Do not resolve symbolic links: the target of a link may be outside the repository.
    full = Path(os.path.normpath(here / path))
    return full.relative_to(root).as_posix() if full.is_relative_to(root) else PurePosixPath(path).name
