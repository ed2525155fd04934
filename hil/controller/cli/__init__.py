"""The command line: one file a verb; parse, call the library, print."""
