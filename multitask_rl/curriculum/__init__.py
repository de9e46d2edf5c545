"""Which task next: weights, policies, exact quotas."""
