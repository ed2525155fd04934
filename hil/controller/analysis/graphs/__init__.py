"""Models as graphs to be drawn: their nodes, where these stand, and what a stored run says of each."""
