"""The core: one floor for each chapter. A floor imports the floors below it, never those above."""
