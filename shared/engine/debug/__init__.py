"""Chapter 04. Debugging a run: non-finite losses, loss spikes, model dumps."""
