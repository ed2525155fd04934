"""Files that `hil web` caches, creates and saves."""
