"""Commands for packages that extend hil."""
