"""The merge itself: what is counted, the plan that follows from it, and the sweeps that merge, over any stores."""
