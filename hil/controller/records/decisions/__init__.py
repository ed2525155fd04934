"""Records of decisions about models and commits."""
