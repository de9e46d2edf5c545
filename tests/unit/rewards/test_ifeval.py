from __future__ import annotations

import doctest

import pytest

from multitask_rl.records import Failure, Score
from multitask_rl_rewards import languages
from multitask_rl_rewards.ifeval import IFEval
from multitask_rl_rewards.ifeval_checks import CHECKS
from multitask_rl_rewards.languages import LANGUAGES, detect_language
from reward_builders import real_rows, rollout

AT_LEAST, LESS = "at least", "less than"
# instruction -> keywords, texts that follow it, texts that do not
CASES = {
    "keywords:existence": ({"keywords": ["mom", "cat"]}, ["Mom has a CAT."], ["mom", "cat"]),
    "keywords:frequency": (
        {"keyword": "war", "frequency": 2, "relation": AT_LEAST},
        ["War and war"],
        ["war"],
    ),
    "keywords:forbidden_words": ({"forbidden_words": ["rock"]}, ["a rocket"], ["Rock!"]),
    "keywords:letter_frequency": (
        {"letter": "t", "let_frequency": 2, "let_relation": LESS},
        ["T only once"],
        ["that"],
    ),
    "language:response_language": (
        {"language": "de"},
        ["Das ist nicht der Tag und ich gehe."],
        ["This is the day.", "1 2"],
    ),
    "length_constraints:number_paragraphs": (
        {"num_paragraphs": 2},
        ["a\n***\nb", "***\na\n***\nb\n***"],
        ["a", "a *** b *** c", "a *** *** b"],
    ),
    "length_constraints:number_words": (
        {"num_words": 3, "relation": AT_LEAST},
        ["one two three"],
        ["one, two"],
    ),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": LESS},
        ["Mr. Fox is here.", "No end"],
        ["One. Two.", "One! and more"],
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
        ["Hello.\n\n*Weekend*, at last"],
        ["Hello.\n\nAt last", "weekend", "a\n\nweekend\n\nb"],
    ),
    "detectable_content:postscript": (
        {"postscript_marker": "P.P.S"},
        ["Bye.\nP.P.S. more", "p. p. s more"],
        ["P.S. no", "pps"],
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, ["[name] of [town]"], ["[name]"]),
    "detectable_format:number_bullet_lists": (
        {"num_bullets": 2},
        ["* a\n- b", "text\n  * a\n  * b\n"],
        ["* a", "* a\n* b\n* c", "**a**\n**b**"],
    ),
    "detectable_format:constrained_response": ({}, ["My answer is maybe."], ["Maybe."]),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2},
        ["*a* and **b**"],
        ["*a*", "** **\n* *"],
    ),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        ["SECTION 1\na\nSection 2\nb"],
        ["Section 1", "Section one, Section two"],
    ),
    "detectable_format:json_format": (
        {},
        ['{"a": [1]}', '```json\n{"a": 1}\n```'],
        ["{a: 1}", "so: {}", "[" * 5000],
    ),
    "detectable_format:title": ({}, ["<<A title>>\ntext"], ["<A title>", "<<>>", "<< >>"]),
    "combination:two_responses": ({}, ["a\n******\nb"], ["a", "a ****** a", "a****** ******b"]),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Write it."}, ["write it. Done"], ["I write it."]),
    "startend:end_checker": (
        {"end_phrase": "Any more?"},
        ['x "any more?"', "x Any more? "],
        ["Any more? No."],
    ),
    "startend:quotation": ({}, ['"a"'], ["a", '"', '"a']),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": AT_LEAST},
        ["THIS is FINE"],
        ["This is FINE"],
    ),
    "change_case:english_capital": (
        {},
        ["THIS IS THE END"],
        ["THIS is THE END", "DAS IST DER TAG UND ICH", "123"],
    ),
    "change_case:english_lowercase": (
        {},
        ["this is the end"],
        ["This is the end", "das ist der tag und ich"],
    ),
    "punctuation:no_comma": ({}, ["a; b"], ["a, b"]),
}
SENTENCES = {
    "hi": "यह एक अच्छा दिन है और मैं घर में हूँ।",
    "mr": "हे एक सुंदर शहर आहे आणि मी तेथे राहतो पण ते जवळ नाही.",
    "ne": "यो एक राम्रो दिन हो र म घरमा छु। तपाईं पनि आउनुहोस्, हामी खुसी छौं र काम गर्न सकिन्छ।",
    "kn": "ಇದು ಒಳ್ಳೆಯ ದಿನ",
    "pa": "ਇਹ ਇੱਕ ਚੰਗਾ ਦਿਨ ਹੈ",
    "gu": "આ એક સારો દિવસ છે",
    "te": "ఇది మంచి రోజు",
    "ta": "இது ஒரு நல்ல நாள்",
    "bn": "এটি একটি ভালো দিন",
    "th": "วันนี้เป็นวันที่ดี",
    "ko": "오늘은 좋은 날입니다",
    "vi": "Hôm nay là một ngày đẹp trời và tôi rất vui.",
    "ru": "Это был хороший день, и мы не пошли домой.",
    "bg": "Това е добър ден и аз ще отида да се разходя с приятели.",
    "ar": "هذا يوم جميل و نحن في البيت مع كل من كان هنا",
    "fa": "این یک روز خوب است و من در خانه با شما هستم که بود",
    "ur": "یہ ایک اچھا دن ہے اور میں گھر میں ہوں",
    "it": "Questa è una bella giornata e non sono a casa con gli amici.",
    "pt": "Este é um bom dia e eu não vou para casa com você.",
    "fi": "Tämä on hyvä päivä ja hän oli myös kotona, mutta ei nyt.",
    "sw": "Hii ni siku nzuri sana na mimi niko katika nyumba ya rafiki.",
    "de": "Das ist ein guter Tag und ich bin nicht zu Hause.",
    "en": "This is a good day and I am not at home with you.",
    "fr": "Ce n'est pas un jour pour les vacances, et je suis dans la maison avec vous.",
    "es": "Este es un buen día y no estoy en la casa con los amigos.",
    "ja": "今日は良い日です",
    "zh": "今天是个好日子",
}


def test_there_is_a_case_for_each_of_the_25_kinds():
    assert set(CASES) == set(CHECKS)
    assert len(CHECKS) == 25


@pytest.mark.parametrize("name", CASES)
def test_each_check_tells_followed_from_not_followed(name):
    keywords, followed, broken = CASES[name]
    for text in followed:
        assert CHECKS[name](text, **keywords), text
    for text in broken:
        assert not CHECKS[name](text, **keywords), text


@pytest.mark.parametrize("language", SENTENCES)
def test_languages_are_told_apart(language):
    assert detect_language(SENTENCES[language]) == language
    assert language in LANGUAGES


def test_examples_in_docstrings_hold_and_texts_without_letters_have_no_language():
    assert doctest.testmod(languages).failed == 0
    assert detect_language("") == detect_language("123 !?") == ""
    assert detect_language("guitar: string, piano: keyboard") == "en", "a list has no common word"


def score(response: str, *tests: dict) -> Score | Failure:
    (result,) = IFEval().score([rollout(response, tests=list(tests))])
    return result


NO_COMMA = {"instruction_id": "punctuation:no_comma", "kwargs": {}}
TITLE = {"instruction_id": "detectable_format:title", "kwargs": {"padding": None}}


def test_value_is_the_share_followed_and_all_needs_every_one():
    assert score("<<T>> a", NO_COMMA, TITLE) == Score(value=1.0, components={"all": 1.0})
    assert score("a", NO_COMMA, TITLE) == Score(value=0.5, components={"all": 0.0})


@pytest.mark.parametrize("response", ["", "  \n", "<think>a", "<think>a</think>", "?!", '""', "[][]"])
def test_a_response_without_a_word_follows_nothing(response):
    quoted = {"instruction_id": "startend:quotation", "kwargs": {}}
    places = {"instruction_id": "detectable_content:number_placeholders", "kwargs": {"num_placeholders": 2}}
    assert score(response, NO_COMMA, quoted, places) == Score(value=0.0, components={"all": 0.0})


@pytest.mark.parametrize(
    "tests",
    [
        [],
        "no_comma",
        None,
        ["no_comma"],
        [{"instruction_id": "no:such", "kwargs": {}}],
        [{"instruction_id": "keywords:existence", "kwargs": {}}],
        [
            {
                "instruction_id": "length_constraints:number_words",
                "kwargs": {"num_words": 3, "relation": "about"},
            }
        ],
    ],
)
def test_unknown_or_malformed_instructions_are_data_failures(tests):
    (result,) = IFEval().score([rollout("a", tests=tests)])
    assert isinstance(result, Failure)
    assert result.kind == "data"


@pytest.mark.realdata
def test_every_real_row_can_be_checked_and_garbage_rarely_passes():
    rows = real_rows("ifeval")
    assert {test["instruction_id"] for row in rows for test in row["tests"]} == set(CHECKS)
    languages_asked = {
        t["kwargs"]["language"] for row in rows for t in row["tests"] if "language" in t["kwargs"]
    }
    assert languages_asked <= LANGUAGES
    for response, at_most in (("", 0.0), ("asdf qwer, zxcv", 0.15), ("I cannot answer, sorry.", 0.15)):
        results = IFEval().score([rollout(response, **row) for row in rows])
        assert all(isinstance(result, Score) for result in results)
        assert sum(result.components["all"] for result in results) / len(rows) <= at_most
