"""Chapter 06. Training over many ranks. Chapters 07 to 09 add files here."""
