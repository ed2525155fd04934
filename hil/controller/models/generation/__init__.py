"""Generation with decoders: the specification, the prompts, and the roles of a model's inputs and outputs."""
