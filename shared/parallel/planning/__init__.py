"""Chapter 06. Communication cost and memory estimates, by formula."""
