"""The controller: compiles models, runs them on boards, computes references, compares outputs and writes reports."""
