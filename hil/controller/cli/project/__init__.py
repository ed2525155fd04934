"""Commands for a project and the environment: `hil init`, `hil config`, `hil doctor`."""
