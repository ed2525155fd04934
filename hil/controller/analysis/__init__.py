"""Analyses beyond a verdict: benchmarks, bisection, profiles, layers."""
