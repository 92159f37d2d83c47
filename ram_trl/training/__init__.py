"""What touches trainers: the callback, the ranks of a job, agents that take turns in one process."""
