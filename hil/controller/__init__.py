"""The controller: compiles, pushes, runs, refers, compares and reports."""
