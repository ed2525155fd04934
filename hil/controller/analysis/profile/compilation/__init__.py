"""Profiles of compilations."""
