"""Chapter 12. Pages and tables of one run or of several."""
