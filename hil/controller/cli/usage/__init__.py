"""Help and shell completion of hil's commands."""
