"""Chapter 12. Training modes: pretraining, fine-tuning, and learning from preferences or rewards."""
