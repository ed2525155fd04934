"""What is kept on the host: the cache, runs, tensors; and processes for what may crash."""
