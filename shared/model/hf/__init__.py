"""Chapter 02. Models in Hugging Face's format: a folder with `config.json` and safetensors, read and written for every family."""
