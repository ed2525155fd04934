"""Commands for a project and its environment: `hil init`, `hil config`, `hil doctor`."""
