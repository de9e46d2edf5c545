"""The 25 checks of IFEval: does a text follow one instruction that a program can verify?

Source: Instruction-Following Evaluation for Large Language Models (arXiv:2311.07911), table 1. Words are runs
of word characters and sentences end at ``.``, ``!`` or ``?`` (the paper uses NLTK's models for both); the
language is told by ``languages.detect_language``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from multitask_rl_rewards.languages import detect_language

Check = Callable[..., bool]
"""``check(text, **keywords of the instruction)``."""

_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"')\]]*+(?=\s|$)|[\u0964\u3002\uff01\uff1f]")
_ABBREVIATION = re.compile(r"\b(?:mr|mrs|ms|dr|prof|st|vs|etc|e\.g|i\.e|no|jr|sr|[a-z])\.$", re.IGNORECASE)
_BULLET = re.compile(r"\s*(?:\*(?!\*)|-(?!-))\s*\S")
_ANSWERS = ("my answer is yes.", "my answer is no.", "my answer is maybe.")


def _compare(count: int, relation: str, bound: int) -> bool:
    if relation not in ("at least", "less than"):
        raise ValueError(f"unknown relation {relation!r}; allowed: 'at least', 'less than'")
    return count >= bound if relation == "at least" else count < bound


def _count_sentences(text: str) -> int:
    ends = [m.end() for m in _SENTENCE_END.finditer(text) if not _ends_abbreviated(text, m.start())]
    rest = text[ends[-1] :] if ends else text
    return len(ends) + bool(re.search(r"\w", rest))


def _ends_abbreviated(text: str, stop: int) -> bool:
    """Whether the full stop at ``stop`` belongs to an abbreviation; none has more than five characters."""
    return _ABBREVIATION.search(text[max(0, stop - 8) : stop + 1]) is not None


def _paragraphs(text: str, pattern: str) -> list[str]:
    return [part.strip() for part in re.split(pattern, text)]


def keywords_existence(text: str, *, keywords: list[str]) -> bool:
    """Every keyword occurs."""
    return all(re.search(re.escape(word), text, re.IGNORECASE) for word in keywords)


def keywords_frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """The keyword occurs at least, or less than, ``frequency`` times."""
    return _compare(len(re.findall(re.escape(keyword), text, re.IGNORECASE)), relation, frequency)


def forbidden_words(text: str, *, forbidden_words: list[str]) -> bool:
    """No forbidden word occurs as a whole word."""
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    """The letter (or sign) occurs at least, or less than, ``let_frequency`` times."""
    return _compare(text.lower().count(letter.lower()), let_relation, let_frequency)


def response_language(text: str, *, language: str) -> bool:
    """Most of the response is in ``language`` (ISO 639-1 code)."""
    return detect_language(text) == language


def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Exactly so many paragraphs stand between dividers ``***``; none of them is empty."""
    parts = _paragraphs(text, r"\s?\*\*\*\s?")
    inner = parts[1:-1] if len(parts) > 1 else []
    return all(inner) and sum(map(bool, parts)) == num_paragraphs


def number_words(text: str, *, num_words: int, relation: str) -> bool:
    """The response has at least, or less than, ``num_words`` words."""
    return _compare(len(re.findall(r"\w+", text)), relation, num_words)


def number_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    """The response has at least, or less than, ``num_sentences`` sentences."""
    return _compare(_count_sentences(text), relation, num_sentences)


def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """``num_paragraphs`` paragraphs stand between blank lines, and the n-th begins with the word."""
    paragraphs = [part for part in _paragraphs(text, r"\n\n") if part]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= len(paragraphs):
        return False
    words = paragraphs[nth_paragraph - 1].split()
    found = re.match(r"\w+(?:['-]\w+)*", words[0].lstrip("\"'*_(").lower())
    return found is not None and found[0] == first_word.lower()


def postscript(text: str, *, postscript_marker: str) -> bool:
    """A postscript begins with the marker (``P.S.`` or ``P.P.S``)."""
    letters = [letter for letter in postscript_marker.lower() if letter.isalpha()]
    return re.search(r"(?<!\w)" + r"\.\s?".join(letters) + r"\b\.?", text.lower()) is not None


def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    """There are at least ``num_placeholders`` placeholders in square brackets."""
    return len(re.findall(r"\[[^\[\]\n]*\]", text)) >= num_placeholders


def number_bullet_lists(text: str, *, num_bullets: int) -> bool:
    """There are exactly ``num_bullets`` bullet points (``* `` or ``- ``)."""
    return sum(_BULLET.match(line) is not None for line in text.split("\n")) == num_bullets


def constrained_response(text: str) -> bool:
    """The response contains one of the three allowed answers."""
    return any(answer in text.lower() for answer in _ANSWERS)


def number_highlighted_sections(text: str, *, num_highlights: int) -> bool:
    """At least ``num_highlights`` parts are highlighted by ``*...*`` or ``**...**``."""
    found = re.findall(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*", text)
    return sum(bool((double or single).strip()) for double, single in found) >= num_highlights


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """There are at least ``num_sections`` sections, each begun by the word and a number ("Section 1")."""
    return len(re.findall(rf"\b{re.escape(section_spliter)}\s?\d+", text, re.IGNORECASE)) >= num_sections


def json_format(text: str) -> bool:
    """The whole response is JSON, with or without a fence around it."""
    text = re.sub(r"^```(?:json)?", "", text.strip(), flags=re.IGNORECASE).removesuffix("```")
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """A title stands in double angular brackets."""
    lines = ((line, line.find("<<"), line.rfind(">>")) for line in text.split("\n"))
    return any(line[start:end].strip(" <>") for line, start, end in lines if 0 <= start < end)


def two_responses(text: str) -> bool:
    """Two different responses, separated by six asterisks."""
    parts = [part.strip() for part in text.split("******")]
    inner = parts[1:-1] if len(parts) > 1 else []
    answers = [part for part in parts if part]
    return all(inner) and len(answers) == 2 and answers[0] != answers[1]


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """The response begins with the request, word for word."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, *, end_phrase: str) -> bool:
    """The response ends with the phrase."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().strip('"').lower())


def capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    """At least, or less than, ``capital_frequency`` words are in capitals."""
    words = re.findall(r"\w+(?:['-]\w+)*", text)
    return _compare(sum(word.isupper() for word in words), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    """The response is in English and in capital letters only."""
    return text.isupper() and detect_language(text) == "en"


def english_lowercase(text: str) -> bool:
    """The response is in English and in small letters only."""
    return text.islower() and detect_language(text) == "en"


def no_comma(text: str) -> bool:
    """The response has no comma."""
    return "," not in text


def quotation(text: str) -> bool:
    """The whole response stands in double quotation marks."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS: Mapping[str, Check] = {
    "keywords:existence": keywords_existence,
    "keywords:frequency": keywords_frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:postscript": postscript,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
"""Instruction id of the data set -> its check."""
