"""What several chapters' scripts and notebooks share, beside the chapters' folders. The core imports nothing from here."""
