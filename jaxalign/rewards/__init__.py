"""What RL is rewarded by: learnt models, functions, verifiers, ratings and sums of these."""
