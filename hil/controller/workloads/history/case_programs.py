"""Find the programs of stored cases: in the run's directory, in the cache, next to the model, or in a bundle."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from hil.bundles import Bundle
from hil.controller.models.compiling import LOG
from hil.controller.records.measurements.history import StoredProgram
from hil.controller.records.run import StoredArtifact, StoredModel
from hil.controller.storage.cache import Cache, read_digests
from hil.controller.storage.history.programs import ProgramSource, combine_digests
from hil.controller.workloads.bundles.program_case import extract_program
from hil.errors import UsageError


class CaseProgramFinder:
    """Finder of programs. The entries of the cache are listed only once."""

    def __init__(self, cache: Cache | None = None) -> None:
        self._cache = cache or Cache()

    def find(
        self,
        artifact: StoredArtifact,
        model: StoredModel | None,
        folders: Sequence[Path],
        bundle: Path | None = None,
    ) -> ProgramSource | None:
        """Return the program of a case, or None if it is not available.

        Args:
            folders: directories that may contain the files. The cache is also searched.
            bundle: bundle that may contain the program, or None.
        """
        digests = artifact.digests
        if not digests:
            return None
        places = [folder for folder in folders if all((folder / name).is_file() for name in digests)]
        place = places[0] if places else self._find_cached(digests) or self._extract(bundle, digests)
        if place is None:
            return None
        record = StoredProgram(
            digest=combine_digests(digests),
            runtime=artifact.runtime,
            main=artifact.main or next(iter(digests)),
            files=dict(digests),
            bytes=artifact.bytes,
            function=artifact.function,
            compiler=artifact.compiler,
            flags=artifact.flags,
            outputs=model.outputs if model else None,
        )
        return ProgramSource(record, place)

    def list_digests(self, digest: str) -> dict[str, str]:
        """Return the files of the cached program with this main file, by name; empty if it is not cached."""
        for held in map(self._entries.get, self._keys.get(digest, [])):
            if held is not None:
                return {name: value for name, value in held.items() if name != LOG}
        return {}

    def _find_cached(self, digests: Mapping[str, str]) -> Path | None:
        for key in self._keys.get(next(iter(digests.values())), []):
            if digests.items() <= self._entries[key].items() and (path := self._cache.get(key)) is not None:
                return path
        return None

    def _extract(self, bundle: Path | None, digests: Mapping[str, str]) -> Path | None:
        """Extract the program of a bundle to the cache. Return None if the bundle has another program now."""
        if bundle is None:
            return None
        try:
            program = extract_program(Bundle.open(bundle), self._cache)
        except UsageError:
            return None
        main = PurePosixPath(program.main)
        return program.files[program.main].parents[len(main.parts) - 1] if program.digests == digests else None

    @functools.cached_property
    def _entries(self) -> dict[str, dict[str, str]]:
        """Key of a cache entry -> name -> digest; the most recently used entry first."""
        found = {}
        for entry in self._cache.ls():
            with contextlib.suppress(OSError, ValueError):
                found[entry.key] = read_digests(entry.path)
        return found

    @functools.cached_property
    def _keys(self) -> dict[str, list[str]]:
        """Digest of a file -> keys of the entries with this file."""
        found: dict[str, list[str]] = {}
        for key, digests in self._entries.items():
            for digest in digests.values():
                found.setdefault(digest, []).append(key)
        return found
