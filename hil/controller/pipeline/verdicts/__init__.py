"""Judgement of outputs: criteria, independent references and arithmetic."""
