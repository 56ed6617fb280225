"""Chapter 06. Data parallelism: DDP, ZeRO, FSDP, and what goes with them."""
