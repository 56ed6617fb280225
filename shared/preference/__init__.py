"""Chapter 11. Preference learning: reward models, DPO and its relatives, and reinforcement learning from feedback with PPO."""
