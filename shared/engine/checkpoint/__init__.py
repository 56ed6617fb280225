"""Chapter 04. Checkpoints: snapshots of a run, written atomically and resumed exactly."""
