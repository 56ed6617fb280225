"""Chapter 02. One transformer for every family: GPT, LLaMA, Qwen, Mistral, BERT, T5 and BLOOM, by configuration alone."""
