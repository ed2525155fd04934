"""Models: import, conversion, flows, and inputs."""
