"""What is found out beside a verdict: benches, bisection, profiles, layers."""
