"""A training step as the documentation describes it: slow, plain, and without any of the product's code."""
