"""Chapter 10. Fine-tuning: chats, adapters, soft prompts and quantization, applied to a plain model from outside."""
