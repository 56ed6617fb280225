"""Chapter 09. Expert parallelism (EP): experts spread over ranks, and the all-to-all that carries rows to them and back."""
