"""Chapter 12. What runs left in their folders: a list of runs, and several side by side."""
