"""Chapter 12. A page for a conversation with a model: served to this machine alone, with the standard library."""
