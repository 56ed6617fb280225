"""Chapter 04. The runtime engine: everything around the loop that a long run needs."""
