"""Command line: one module per command, which parses arguments, calls the library and prints results."""
