"""Bundles on the host: create, run, import and export them."""
