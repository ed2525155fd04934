"""Pages of traces and profiles."""
