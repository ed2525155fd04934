"""History of measured cases, with their programs, for `hil history` and `hil gate`.

A history is a directory: ``history.sqlite`` with the entries and annotations, and ``programs/`` with the programs by
digest. The entries can also be in a PostgreSQL database. Any number of processes may read and write a history at the
same time. A write is complete or absent, also after ``kill -9``::

    with HistoryStore.open(Path("hil-runs/history")) as store:
        store.add(entries, programs)            # entries that are present are not added again
        for series in store.series():
            for entry in store.entries(series.id):
                entry.source.commit, entry.samples_ns, entry.outcome, store.program(entry.program)
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hil.controller.records.measurements.history import (
    AddedEntries,
    Confirmation,
    HistoryEntry,
    HistoryNote,
    SeriesKey,
    SeriesSummary,
    StoredProgram,
)
from hil.controller.storage.history import DEFAULT_BASELINE, DEFAULT_QUOTA
from hil.controller.storage.history.database import HistoryDatabase
from hil.controller.storage.history.encoding import (
    check_entry,
    decode_entry,
    decode_record,
    encode_record,
    list_columns,
    pack_samples,
)
from hil.controller.storage.history.place import HistoryPlace
from hil.controller.storage.history.programs import FILES, ProgramFolder, ProgramSource
from hil.controller.storage.history.sqlite_database import open_empty, open_sqlite
from hil.core.digest import digest_of
from hil.core.storage_errors import make_full_disk_error
from hil.errors import UsageError, did_you_mean

# The program of such an entry can be a baseline: its outputs are correct, or it was measured without comparison.
_IS_GOOD = "program != '' and (outcome = 'PASS' or (outcome = 'SKIP' and p50_ns is not null))"
_ID_LENGTH = 12
_ALL = 1 << 62  # limit of a query for all entries
_MIN_COMMIT_LENGTH = 4
# Replace an entry only if the new one is newer and has a different result. An imported file has the time of its last
# change, so a copied file is newer but has the same result.
_REPLACE_OLDER = (
    "on conflict (run, case_name) do update set series = excluded.series, created = excluded.created,"
    " commit_id = excluded.commit_id, branch = excluded.branch, program = excluded.program, outcome = excluded.outcome,"
    " p50_ns = excluded.p50_ns, document = excluded.document, samples = excluded.samples, confirmed = ''"
    " where excluded.created > entries.created and (excluded.outcome <> entries.outcome"
    " or excluded.p50_ns <> entries.p50_ns or (excluded.p50_ns is null) <> (entries.p50_ns is null)"
    " or excluded.samples <> entries.samples)"
)
_NEWEST = "row_number() over (partition by series order by created desc, run desc)"


def make_series_id(key: SeriesKey) -> str:
    """Return the ID of a series: the first digits of a digest of its key."""
    return digest_of(encode_record(key)).split(":")[1][:_ID_LENGTH]


def compute_median_ns(samples: Sequence[float]) -> float | None:
    """Return the median of times in nanoseconds, or None without times."""
    return statistics.median(samples) if samples else None


def compute_relative_spread(samples: Sequence[float]) -> float | None:
    """Return the interquartile range of times, divided by the median. Return None for fewer than four times."""
    if len(samples) < 4:
        return None
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle if middle else None


class HistoryStore:
    """History of measured cases. Create with :meth:`open`. The context manager closes the database.

    All methods raise StorageError if the history is damaged or cannot be read or written.

    Attributes:
        place: place of the history.
    """

    def __init__(self, database: HistoryDatabase, quota: int, baseline: str) -> None:
        self.place = database.place
        self._database = database
        self._quota = quota
        self._baseline = baseline
        self._programs = ProgramFolder(self.place.folder / "programs")

    @classmethod
    def open(
        cls,
        place: HistoryPlace | Path,
        *,
        create: bool = False,
        quota: int = DEFAULT_QUOTA,
        baseline: str = DEFAULT_BASELINE,
    ) -> HistoryStore:
        """Open a history.

        Args:
            place: place of the history; a path is the directory of a SQLite history.
            create: create a missing history. Without it, a missing history has no entries and cannot be changed.
            quota: maximum size of the programs in bytes. Even above the quota, each series keeps the programs of its
                newest entry and the last good entry. On the baseline branch, it also keeps the programs of its last
                good, confirmed and accepted entries.
            baseline: name of the baseline branch.

        Raises:
            StorageError: the place is not usable, or the database is damaged or from a newer hil.
            UsageError: the PostgreSQL URL is invalid, or the extra `farm` is not installed.
        """
        place = HistoryPlace(place) if isinstance(place, Path) else place
        return cls(_open_database(place, create=create), quota, baseline)

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def __enter__(self) -> HistoryStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def series(self) -> list[SeriesSummary]:
        """Return all series with their newest entry, sorted by model, case and board."""
        text = (
            f"with ranked as (select series, created, outcome, commit_id, {_NEWEST} as rank, count(*) over (partition"
            " by series) as total, first_value(p50_ns) over (partition by series order by p50_ns is null, created desc,"
            " run desc) as p50_ns from entries)"
            f" select id, {self._database.bound_column('key')}, total, created, outcome, commit_id, p50_ns"
            " from ranked join series on series.id = ranked.series where rank = 1"
        )
        found = []
        with self._database.errors():
            for name, key, total, created, outcome, commit, p50_ns in self._database.execute(text):
                row = {"id": name, "entries": total, "created": created, "outcome": outcome, "commit": commit}
                found.append(SeriesSummary(**row, key=decode_record(key, SeriesKey, self.place), p50_ns=p50_ns))
        return sorted(found, key=lambda one: (one.key.model, one.key.case, one.key.board, one.key.runtime, one.id))

    def find_series(self, name: str) -> SeriesSummary:
        """Return a series by ID, unambiguous start of an ID, case, or model.

        Raises:
            UsageError: no series or multiple series match.
        """
        known = self.series()
        for texts in (lambda one: (one.id,), lambda one: (one.key.case, one.key.model)):
            if len(found := [one for one in known if name in texts(one)]) == 1:
                return found[0]
            if found:
                break
        else:
            found = [one for one in known if name and one.id.startswith(name)]
        if len(found) == 1:
            return found[0]
        what = f"ambiguous series {name!r}: {', '.join(one.id for one in found)}" if found else f"no series {name!r}"
        names = {text for one in known for text in (one.id, one.key.case, one.key.model)}
        similar = "" if found else did_you_mean(name, sorted(names))
        raise UsageError(f"{what} in {self.place}", hint=f"{similar}list them with hil history ls")

    def entries(
        self, series: str | SeriesKey = "", *, samples: bool = True, newest: int | None = None
    ) -> Iterator[HistoryEntry]:
        """Yield the entries of a series, or of all series, from the oldest to the newest, with their annotations.

        Args:
            series: ID or key of a series; "" is all series.
            samples: False leaves ``samples_ns`` empty, which is faster.
            newest: yield only this number of the newest entries; None yields all.
        """
        wanted = series if isinstance(series, str) else make_series_id(series)
        annotations = self.annotations()
        document, times = map(self._database.bound_column, ("document", "samples"))
        with self._database.errors():
            rows = self._database.stream(
                f"select {document}, {times if samples else 'null'}, confirmed from entries where (run, case_name) in"
                " (select run, case_name from entries where ? in ('', series) order by created desc, run desc,"
                " case_name desc limit ?) order by created, run, case_name",
                (wanted, _ALL if newest is None else newest),
            )
            for row in rows:
                entry = decode_entry(row[0], row[1] if samples else b"", row[2], self.place)
                yield entry.replace(annotations=[one for one in annotations if _is_applicable(one, entry)])

    def add(self, entries: Iterable[HistoryEntry], programs: Iterable[ProgramSource] = ()) -> AddedEntries:
        """Add entries, and the programs that they name, in one transaction.

        Adding a run again has no effect. An entry replaces a stored entry with the same run and case only if it is
        newer and the result differs. `hil run --resume` creates such entries. An entry may lack the board or runtime
        because its case failed early. Such an entry joins the series with an otherwise equal key, if there is only one
        such series.

        Returns:
            The numbers of added entries and programs, and a list of invalid entries and programs, which were not
                stored.

        Raises:
            StorageError: the history cannot be written. The history is unchanged.
        """
        report = AddedEntries(history=str(self.place), added=0, present=0, programs=0, evicted=0, skipped=[])
        self._programs.remove_leftovers()
        with contextlib.ExitStack() as stack:
            # Copy without the lock, because other writers wait for the lock only for a limited time.
            copies = self._copy_programs(programs, report, stack)
            stack.enter_context(self._database.errors())
            stack.enter_context(self._database.writing())
            report.programs = sum(self._programs.publish(digest, copy) for digest, copy in copies)
            known = self._read_keys()
            for entry in entries:
                try:
                    checked = check_entry(entry)
                except (UsageError, UnicodeError) as error:
                    report.skipped.append(f"{entry.run!r} {entry.case!r}: {error}")
                    continue
                if self._insert(checked, known):
                    report.added += 1
                else:
                    report.present += 1
            report.evicted = len(self._programs.evict(self._quota, self._rank_programs))
        return report

    def program(self, digest: str) -> Path | None:
        """Return the directory with a program's files, or None if the history does not have the program."""
        folder = self._programs.find(digest) if digest else None
        return None if folder is None else folder / FILES

    def program_record(self, digest: str) -> StoredProgram | None:
        """Return the record of a program, or None if the history does not have the program."""
        return self._programs.read(digest) if digest else None

    def annotations(self) -> list[HistoryNote]:
        """Return all annotations, oldest first."""
        with self._database.errors():
            rows = self._database.execute(
                "select commit_id, run, case_name, created, text from annotations order by number"
            ).fetchall()
        return [
            HistoryNote(commit=commit, run=run, case=case, created=created, text=text)
            for commit, run, case, created, text in rows
        ]

    def annotate(self, target: str, text: str) -> tuple[HistoryNote, int]:
        """Add a note to all entries of a commit or a run, or to an entry.

        Args:
            target: a commit or its first digits, the ID of a run, ``RUN:CASE``, or a branch, which means the commit of
                the branch's newest entry.

        Returns:
            The annotation, and the number of its entries.

        Raises:
            UsageError: no entry matches, or multiple commits match.
        """
        target, text = (one.encode(errors="backslashreplace").decode() for one in (target, text))
        with self._database.errors(), self._database.writing():
            fields, count = self._find_target(target)
            note = HistoryNote(**fields, text=text, created=time.time())
            self._database.execute(
                "insert into annotations (commit_id, run, case_name, created, text) values (?, ?, ?, ?, ?)",
                (note.commit, note.run, note.case, note.created, text),
            )
        return note, count

    def confirm(self, entry: HistoryEntry, how: Confirmation) -> None:
        """Mark an entry as correct and not slower than before.

        `hil gate` compares later programs with the program of this entry.
        """
        with self._database.errors(), self._database.writing():
            self._database.execute(
                "update entries set confirmed = ? where run = ? and case_name = ?", (how, entry.run, entry.case)
            )

    def accept(self, target: str) -> int:
        """Mark all entries of a commit or a run, or an entry, as accepted. Return their number.

        Args:
            target: see :meth:`annotate`.

        Raises:
            UsageError: no entry matches, or multiple commits match.
        """
        with self._database.errors(), self._database.writing():
            fields, count = self._find_target(target.encode(errors="backslashreplace").decode())
            if commit := fields.get("commit"):
                self._database.execute("update entries set confirmed = 'accepted' where commit_id = ?", (commit,))
            else:
                self._database.execute(
                    "update entries set confirmed = 'accepted' where run = ? and ? in ('', case_name)",
                    (fields["run"], fields["case"]),
                )
        return count

    def _find_target(self, target: str) -> tuple[dict[str, str], int]:
        run, _, case = target.partition(":")
        (count,) = self._database.execute(
            "select count(*) from entries where run = ? and ? in ('', case_name)", (run, case)
        ).fetchone()
        if count:
            return {"run": run, "case": case}, count
        commits = []
        if len(target) >= _MIN_COMMIT_LENGTH:
            commits = self._database.execute(
                "select commit_id, count(*) from entries where substr(commit_id, 1, ?) = ? group by commit_id",
                (len(target), target),
            ).fetchall()
        if len(commits) == 1:
            return {"commit": commits[0][0]}, commits[0][1]
        newest = self._database.execute(
            "select commit_id, (select count(*) from entries as other where other.commit_id = entries.commit_id)"
            " from entries where branch = ? and branch != '' and commit_id != ''"
            " order by created desc, run desc limit 1",
            (target,),
        ).fetchone()
        if newest and not commits:
            return {"commit": newest[0]}, newest[1]
        what = f"ambiguous commit {target!r}" if commits else f"no entry of commit, branch or run {target!r}"
        raise UsageError(
            f"{what} in {self.place}",
            hint="specify a commit, a branch, a run or RUN:CASE, as hil history show prints them",
        )

    def _copy_programs(
        self, sources: Iterable[ProgramSource], report: AddedEntries, stack: contextlib.ExitStack
    ) -> list[tuple[str, Path]]:
        """Return digests and copies of programs that are not stored. The stack deletes unpublished copies.

        Raises StorageError if the disk is full or read-only.
        """
        copies = []
        for source in sources:
            digest = source.record.digest
            if source.record.bytes > self._quota:
                report.skipped.append(f"program {digest}: larger than the quota of {self._quota} bytes")
                continue
            try:
                copy = stack.enter_context(self._programs.copy_program(source))
            except UsageError as error:
                if make_full_disk_error(error.__cause__):
                    raise  # a later attempt can store the program
                report.skipped.append(f"program {digest}: {error.message}")
                continue
            if copy is not None:
                copies.append((digest, copy))
        return copies

    def _read_keys(self) -> list[SeriesKey]:
        return [
            decode_record(text, SeriesKey, self.place)
            for (text,) in self._database.execute(f"select {self._database.bound_column('key')} from series")
        ]

    def _insert(self, entry: HistoryEntry, known: Sequence[SeriesKey]) -> bool:
        entry = entry.replace(key=_complete_key(entry.key, known), annotations=[], confirmed="")
        key, name = entry.key, make_series_id(entry.key)
        plain = entry.replace(samples_ns=[])
        run, case, *others = list_columns(entry)
        values = (run, case, name, entry.created, *others, entry.p50_ns, encode_record(plain))
        inserted = self._database.execute(
            f"insert into entries values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, '') {_REPLACE_OLDER}",
            (*values, pack_samples(entry.samples_ns)),
        ).rowcount
        if inserted:
            self._database.execute(
                "insert into series values (?, ?) on conflict (id) do nothing", (name, encode_record(key))
            )
        return bool(inserted)

    def _rank_programs(self) -> tuple[dict[str, float], set[str]]:
        """Return the last use of each program, and the programs that are never deleted."""
        used = dict(self._database.execute("select program, max(created) from entries group by program"))
        kept = {
            digest
            for condition, values in (
                ("program != ''", ()),
                (_IS_GOOD, ()),
                (f"{_IS_GOOD} and branch = ?", (self._baseline,)),
                # A gate compares with these programs and ignores other branches.
                (f"{_IS_GOOD} and branch = ? and confirmed != ''", (self._baseline,)),
                (f"{_IS_GOOD} and branch = ? and confirmed = 'accepted'", (self._baseline,)),
            )
            for (digest,) in self._database.execute(
                f"select program from (select program, {_NEWEST} as rank from entries where {condition}) as ranked"
                " where rank = 1",
                values,
            )
        }
        return used, kept


def _open_database(place: HistoryPlace, *, create: bool) -> HistoryDatabase:
    if not place.url:
        return open_sqlite(place, create=create)
    # Imported on use, because the extra `farm` contains psycopg.
    from hil.controller.storage.history.postgres_database import open_postgres

    return open_postgres(place, create=create) or open_empty(place)


def _complete_key(key: SeriesKey, known: Sequence[SeriesKey]) -> SeriesKey:
    """Complete an unknown board or runtime in a key.

    Return the known key that is equal in all other parts, if there is exactly one. Otherwise return ``key``.
    """
    if key.board and key.runtime:
        return key
    found = [
        one for one in known if key == one.replace(board=key.board and one.board, runtime=key.runtime and one.runtime)
    ]
    return found[0] if len(found) == 1 else key


def _is_applicable(note: HistoryNote, entry: HistoryEntry) -> bool:
    if note.commit:
        return note.commit == entry.source.commit
    return note.run == entry.run and note.case in ("", entry.case)
