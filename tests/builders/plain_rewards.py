"""Rewards for runs from Python. Workers import this module, so it imports nothing slow."""


def digits(responses: list[str]) -> list[float]:
    """Return 1 for a response that begins with a digit."""
    return [float(response[:1].isdigit()) for response in responses]
