"""Chapter 06. Ranks and what they say to each other: the communicator, its trace, ranks as threads and as processes."""
