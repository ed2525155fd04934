"""Two tensors beside each other, reduced to what a person can look at: maps, histograms, the worst elements."""
