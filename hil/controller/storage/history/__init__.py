"""History of measured cases: a SQLite database, and programs by digest."""

from pathlib import Path

DEFAULT_PATH = Path("hil-runs", "history")
# Defaults: maximum size of the programs in bytes, and the branch whose last good programs are never deleted.
DEFAULT_QUOTA = 2 << 30
DEFAULT_BASELINE = "main"
