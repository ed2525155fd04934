"""Records of a farm."""
