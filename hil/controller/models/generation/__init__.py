"""Generate tokens with decoders: read the specification and the prompts, and detect the roles of inputs and outputs."""
