"""Offline merging: `save_pretrained` folders and adapters in, a model or an adapter out."""
