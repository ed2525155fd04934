"""History of a farm: add the results of finished jobs."""
