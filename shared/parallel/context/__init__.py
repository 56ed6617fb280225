"""Chapter 07. Context parallelism: ring attention over sequences that ranks share."""
