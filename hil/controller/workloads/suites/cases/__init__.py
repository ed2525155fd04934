"""Cases of suites, and their sources."""
