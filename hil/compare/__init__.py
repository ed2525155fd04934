"""The comparer: what a board computed beside what a reference computed. It needs numpy only: a board has it too."""
