"""Chapter 12. What a run needs and reaches, computed before it starts."""
