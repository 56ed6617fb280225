"""Chapter 03. Cleaning: stages that look at one document at a time, in an order that the configuration gives, and a report of each."""
