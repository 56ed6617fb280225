"""Chapter 12. A conversation with a model: in the terminal, and on a page served to this machine alone, with the standard library."""
