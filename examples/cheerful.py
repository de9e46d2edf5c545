"""The prompts and the reward of the two PPO examples. Reward workers import this file alone."""

WORDS = {"good", "great", "nice", "happy", "love", "best", "wonderful", "fun", "beautiful", "thank"}
STARTS = (
    "The movie was",
    "I think that",
    "My friend said",
    "Today we",
    "The food in this place",
    "She told me",
)
ENDS = ("", " really", " again", " in the end", " and so", " because", " although", " but then")


def cheerful(responses: list[str]) -> list[float]:
    """Return the share of cheerful words in each response, at most 1."""
    shares = []
    for response in responses:
        words = [word.strip(".,!?\"'").lower() for word in response.split()]
        shares.append(min(1.0, 5.0 * sum(word in WORDS for word in words) / max(1, len(words))))
    return shares
