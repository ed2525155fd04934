"""Judge the generation of a decoder."""
