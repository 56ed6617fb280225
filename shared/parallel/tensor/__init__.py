"""Chapter 07. Tensor and sequence parallelism."""
