"""Judge outputs: criteria, independent references, arithmetic and repetition."""
