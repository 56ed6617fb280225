"""Chapter 03. From files to batches: collect, clean, tokenize, store, pack, and make tasks of the text."""
