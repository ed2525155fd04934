"""Model graphs for drawing: nodes, layout, and per-node results from stored runs."""
