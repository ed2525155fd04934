"""Pages of measurements over time."""
