"""Chapter 06. Ranks as processes: how they start, find one another and speak."""
