"""Models: read from files, converted, changed by flows, and their inputs."""
