"""Chapter 12. Training pipeline: pretraining, fine-tuning and alignment by one command, each stage a run from the model of the stage before."""
