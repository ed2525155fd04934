"""What every part of hil needs: tensors, digests, clocks, results, files."""
