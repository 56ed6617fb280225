"""Chapter 04. Metrics: throughput, MFU, norms, profiles."""
