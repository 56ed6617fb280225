"""Chapter 03. Cleaning: stages that each process one document at a time, in the configured order, and a report of each."""
