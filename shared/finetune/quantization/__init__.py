"""Chapter 10. Quantization: NF4 for QLoRA, and INT8, INT4, GPTQ and AWQ for use."""
