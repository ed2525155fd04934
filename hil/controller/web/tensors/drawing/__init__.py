"""Maps and charts of tensors: pictures, axes and legends."""
