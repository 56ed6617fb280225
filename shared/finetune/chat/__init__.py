"""Chapter 10. Chats as training data: templates, the mask of what is trained, datasets of conversations."""
