"""Commands that find the cause of a failure."""
