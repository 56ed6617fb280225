"""Chapter 12. Fast generation, verifiable rewards and reinforcement learning from them with GRPO."""
