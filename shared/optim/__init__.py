"""Chapter 05. The optimizers: how a gradient becomes a step, how large the step is, and in which precision it is computed."""
