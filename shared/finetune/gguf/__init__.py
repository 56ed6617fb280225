"""Chapter 10. GGUF, the file format of llama.cpp: a model with its tokenizer and chat template in one file."""
