"""Bundles on the host: made of models, run on boards, written and read in the forms that other tools know."""
