"""Runs of many agents: recipes, the jobs that follow from them, launching and watching those."""
