"""Compare board outputs with reference outputs. Requires only numpy, so boards can import it."""
