"""Chapter 06. Sharded checkpoints: each rank writes and reads its part."""
