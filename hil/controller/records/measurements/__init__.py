"""Records of measurements."""
