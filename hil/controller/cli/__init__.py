"""Command line. Each command has a module, which parses arguments, calls the library and prints results."""
