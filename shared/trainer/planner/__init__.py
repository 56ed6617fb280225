"""Chapter 12. The planner: what a run holds, sends, computes and takes, before anything runs."""
