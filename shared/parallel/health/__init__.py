"""Chapter 06. Ranks that die, hang or drift apart: heartbeat, deadlock diagnosis, replica consistency."""
