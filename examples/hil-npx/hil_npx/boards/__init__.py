"""Board configs: one file for each board type."""
