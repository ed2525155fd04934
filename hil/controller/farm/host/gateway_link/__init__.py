"""A host's connection to its gateway."""
