"""Host storage (cache, runs, tensors), and isolated processes for code that may crash."""
