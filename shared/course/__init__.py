"""Floor 0: the learner's tools. Nothing here imports a floor of the core when it is imported."""
