"""Judgement of outputs: criteria, independent references, arithmetic and repetition."""
