"""Stages of decoders that generate tokens."""
