"""Chapter 12. Training pipeline: pretraining, fine-tuning and alignment by one command, each stage from the model before it."""
