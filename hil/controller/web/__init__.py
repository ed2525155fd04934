"""Pages of what is stored: sessions, comparisons, history, tensors, graphs, traces, boards (docs/web.md)."""
