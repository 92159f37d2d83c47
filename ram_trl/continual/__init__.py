"""Merging while agents train: what it means, the hub, the life of an agent in it. Knows no trainer."""
