"""Chapter 12. The trainer: one configuration, every capability of the course, one run."""
