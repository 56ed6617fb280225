"""Chapter 06. The same layouts on PyTorch's own engines."""
