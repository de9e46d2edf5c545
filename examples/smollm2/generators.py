"""Rows made by a program: instructions for the reward ``ifeval``, facts to extract as JSON, worked sums.

The instructions are of IFEval's kinds (arXiv:2311.07911) in words of our own: no prompt of IFEval is made.
Rows of different splits are different prompts.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations, permutations
from typing import Any

from multitask_rl.seeding import random_stream

Row = dict[str, Any]
Instruction = tuple[str, str, dict[str, Any]]
"""Its words, its id among the checks of ``ifeval``, and the check's keywords."""

FORMS = (
    *("a short text", "a few lines", "a brief message to a neighbour", "a product description"),
    *("a small scene", "a note for a notice board", "a diary entry", "advice for a beginner"),
    *("a reply to a customer", "a paragraph for a school newspaper", "an introduction for a website"),
    *("a reminder for colleagues", "a caption and a comment", "an entry for a travel guide"),
)
TOPICS = (
    *(
        "a lighthouse",
        "rain in April",
        "a bakery that opens at dawn",
        "repairing a bicycle",
        "a lost umbrella",
    ),
    *("growing tomatoes", "an old radio", "a night train", "learning to swim", "a library card"),
    *("feeding ducks", "a broken lift", "the first snow", "a chess club", "painting a fence"),
    *("a mountain hut", "the smell of coffee", "a ferry to an island", "a school choir", "keeping bees"),
    *("a map of the city", "sewing a button", "a garden in winter", "a new kettle", "the local museum"),
    *("walking a dog", "baking bread", "a flat tyre", "a stone bridge", "packing a suitcase"),
    *("a telescope", "an open window", "a village festival", "drinking enough water", "a wooden toy"),
    *("the morning bus", "a football match", "cleaning a fish tank", "a postcard", "an orchard"),
)
QUESTIONS = (
    *("Why do leaves fall in autumn?", "How does a thermometer work?", "What makes a good teacher?"),
    *("Why is the sea salty?", "How do I keep a kitchen tidy?", "What should I pack for a day at the beach?"),
    *("Why do people keep pets?", "How does a zip work?", "What can one do on a rainy day?"),
    *("How do I learn the names of trees?", "Why does bread rise?", "What is a compass for?"),
    *("How can I sleep better?", "Why do cats purr?", "What does a plumber do?", "How is paper recycled?"),
)
WORDS = (
    *("river", "light", "morning", "friend", "stone", "music", "paper", "garden", "window", "winter"),
    *("market", "bridge", "letter", "silver", "coffee", "story", "colour", "water", "village", "train"),
)
ENDINGS = ("That is all for now.", "See you soon!", "Thank you for reading.", "More tomorrow.")


def instruction_rows(seed: int, split: str, number: int) -> list[Row]:
    """Return ``number`` rows (``prompt``, ``tests``) of one or two instructions each."""
    return _distinct(_instruction_row, seed, "instructions", split, number)


def extraction_rows(seed: int, split: str, number: int) -> list[Row]:
    """Return ``number`` rows: a text, the keys to extract, and schemas.

    ``schema`` names keys and types; ``exact_schema`` also the values, so that the reward ``json_schema``
    gives 1 for the right values only.
    """
    return _distinct(_extraction_row, seed, "extraction", split, number)


def worked_rows(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return the training rows whose calculation ``worked_sum`` finds, each with it as ``answer``.

    A row keeps its ``id``. Held-out rows are chosen by id, so the warm start never shows a row that ``math``
    holds out.
    """
    train = [row for row in rows if row["split"] == "train"]
    found = [{**row, "answer": worked_sum(row["prompt"], row["reference"])} for row in train]
    return [row for row in found if row["answer"]]


def worked_sum(problem: str, result: str) -> str:
    """Return the calculation that leads from the numbers of ``problem`` to ``result``, or "".

    A problem with two numbers has a calculation of one operation, ``7 + 2 = 9``. A problem with three numbers
    has one of one operation on two of them, or of two operations on all, ``7 + 2 = 9, 9 * 3 = 27``. If
    several calculations of one operation lead to ``result``, "" is returned: the one that is meant is
    unknown. Of several with two operations the first is returned: most are the same terms in another order.
    """
    texts = re.findall(r"[\d.,]*\d", problem)
    if not 2 <= len(texts) <= 3 or not all(text.isdigit() for text in (*texts, result)):
        return ""
    numbers, wanted = [int(text) for text in texts], int(result)
    single = {text for pair in combinations(numbers, 2) for text, value in _sums(*pair) if value == wanted}
    if single or len(numbers) == 2:
        return single.pop() if len(single) == 1 else ""
    return next(
        (
            f"{first}, {second}"
            for one, other, third in permutations(numbers)
            for first, value in _sums(one, other)
            for second, last in _sums(value, third)
            if last == wanted
        ),
        "",
    )


def _sums(one: int, other: int) -> Iterator[tuple[str, int]]:
    """Yield each calculation with both numbers whose result is a whole number from 0 on, and the result."""
    larger, smaller = max(one, other), min(one, other)
    yield f"{one} + {other} = {one + other}", one + other
    yield f"{larger} - {smaller} = {larger - smaller}", larger - smaller
    yield f"{one} * {other} = {one * other}", one * other
    if smaller and larger % smaller == 0:
        yield f"{larger} / {smaller} = {larger // smaller}", larger // smaller


def _distinct(
    make: Callable[[random.Random], Row], seed: int, name: str, split: str, number: int
) -> list[Row]:
    """Return rows whose prompts differ from each other and from those of the splits before this one."""
    rows: dict[str, Row] = {}
    for index, row in enumerate(_rows(make, seed, name)):
        # a prompt is of one split in every run of this seed
        own = ("train", "train", "train", "validation", "test")[index % 5]
        if own == split and row["prompt"] not in rows:
            rows[row["prompt"]] = {"id": f"{name}-{index}", "split": split, **row}
        if len(rows) == number:
            break
    return list(rows.values())


def _rows(make: Callable[[random.Random], Row], seed: int, name: str) -> Iterator[Row]:
    """Yield endless rows, each prompt once."""
    stream, seen = random_stream(seed, "smollm2-rows", name), set[str]()
    while True:
        row = make(stream)
        if row["prompt"] not in seen:
            seen.add(row["prompt"])
            yield row


# -- instructions -------------------------------------------------------------------------------------------


def _instruction_row(stream: random.Random) -> Row:
    if stream.random() < 0.3:
        request = stream.choice(QUESTIONS)
    else:
        request = f"Write {stream.choice(FORMS)} about {stream.choice(TOPICS)}."
    kinds = stream.sample(list(_KINDS), 2)
    if stream.random() < 0.6 or _group(kinds[0]) == _group(kinds[1]) or _ALONE & set(kinds):
        del kinds[1]
    made = [_KINDS[kind](stream, request) for kind in kinds]
    tests = [{"instruction_id": name, "kwargs": keywords} for _, name, keywords in made]
    return {"prompt": " ".join([request, *(words for words, _, _ in made)]), "tests": tests}


def _group(kind: str) -> str:
    return kind.partition("-")[0]


def _no_comma(stream: random.Random, _: str) -> Instruction:
    words = stream.choice(("Leave out commas entirely.", "Commas are forbidden.", "Do it without one comma."))
    return words, "punctuation:no_comma", {}


def _lowercase(stream: random.Random, _: str) -> Instruction:
    words = stream.choice(("Use small letters only.", "Never use a capital letter; write in English."))
    return words, "change_case:english_lowercase", {}


def _capitals(stream: random.Random, _: str) -> Instruction:
    words = stream.choice(("WRITE ALL OF IT IN CAPITALS.", "Every letter must be a capital; write English."))
    return words, "change_case:english_capital", {}


def _few_words(stream: random.Random, _: str) -> Instruction:
    number = stream.choice((15, 20, 25, 30, 40, 50))
    words = stream.choice((f"Stay below {number} words.", f"Use fewer than {number} words."))
    return words, "length_constraints:number_words", {"num_words": number, "relation": "less than"}


def _many_words(stream: random.Random, _: str) -> Instruction:
    number = stream.choice((20, 25, 30, 40))
    words = f"It should have {number} words or more."
    return words, "length_constraints:number_words", {"num_words": number, "relation": "at least"}


def _sentences(stream: random.Random, _: str) -> Instruction:
    number, relation = stream.choice(((2, "less than"), (3, "less than"), (4, "less than"), (3, "at least")))
    bound = f"fewer than {number}" if relation == "less than" else f"{number} or more"
    keywords = {"num_sentences": number, "relation": relation}
    return f"Use {bound} sentences.", "length_constraints:number_sentences", keywords


def _existence(stream: random.Random, _: str) -> Instruction:
    chosen = stream.sample(WORDS, stream.choice((1, 2, 3)))
    quoted = ", ".join(f'"{word}"' for word in chosen)
    words = stream.choice((f"These words must appear: {quoted}.", f"Work in {quoted}."))
    return words, "keywords:existence", {"keywords": chosen}


def _frequency(stream: random.Random, _: str) -> Instruction:
    word, number = stream.choice(WORDS), stream.choice((2, 3))
    words = f'Say "{word}" {number} times or more.'
    keywords = {"keyword": word, "frequency": number, "relation": "at least"}
    return words, "keywords:frequency", keywords


def _forbidden(stream: random.Random, _: str) -> Instruction:
    chosen = stream.sample(("the", "and", "is", "you", "very", "good", "can", "of"), 2)
    words = f'Do it without the words "{chosen[0]}" and "{chosen[1]}".'
    return words, "keywords:forbidden_words", {"forbidden_words": chosen}


def _letter(stream: random.Random, _: str) -> Instruction:
    letter, number = stream.choice("qzxjkvw"), stream.choice((2, 3, 4))
    keywords = {"letter": letter, "let_frequency": number, "let_relation": "at least"}
    return (
        f'The letter "{letter}" should occur {number} times or more.',
        "keywords:letter_frequency",
        keywords,
    )


def _highlights(stream: random.Random, _: str) -> Instruction:
    number = stream.choice((1, 2, 3))
    words = stream.choice(
        (
            f"Put {number} or more phrases between asterisks, *like this*.",
            f"Emphasise {number} or more parts in markdown: *part*.",
        )
    )
    return words, "detectable_format:number_highlighted_sections", {"num_highlights": number}


def _bullets(stream: random.Random, _: str) -> Instruction:
    number = stream.choice((2, 3, 4))
    words = stream.choice(
        (
            f'Answer as a list of {number} points, each after "* ".',
            f'Give {number} lines that begin with "- ".',
        )
    )
    return words, "detectable_format:number_bullet_lists", {"num_bullets": number}


def _title(stream: random.Random, _: str) -> Instruction:
    words = stream.choice(("Begin with a heading such as <<heading>>.", "Name it in <<these brackets>>."))
    return words, "detectable_format:title", {}


def _sections(stream: random.Random, _: str) -> Instruction:
    number, mark = stream.choice((2, 3)), stream.choice(("Part", "Section", "Chapter"))
    words = f"Divide it into {number} pieces headed {mark} 1, {mark} 2 and so on."
    keywords = {"section_spliter": mark, "num_sections": number}
    return words, "detectable_format:multiple_sections", keywords


def _json(stream: random.Random, _: str) -> Instruction:
    words = stream.choice(("The whole output must be JSON.", "Return valid JSON and nothing else."))
    return words, "detectable_format:json_format", {}


def _placeholders(stream: random.Random, _: str) -> Instruction:
    number = stream.choice((1, 2, 3))
    words = f"Leave {number} or more gaps to fill in, such as [date]."
    return words, "detectable_content:number_placeholders", {"num_placeholders": number}


def _postscript(stream: random.Random, _: str) -> Instruction:
    mark = stream.choice(("P.S.", "P.P.S"))
    return (
        f"Close with an afterthought that starts with {mark}",
        "detectable_content:postscript",
        {"postscript_marker": mark},
    )


def _ending(stream: random.Random, _: str) -> Instruction:
    phrase = stream.choice(ENDINGS)
    words = f'The last words must be "{phrase}" and nothing may follow.'
    return words, "startend:end_checker", {"end_phrase": phrase}


def _quotation(stream: random.Random, _: str) -> Instruction:
    words = stream.choice(('Put it all between " and ".', "The whole reply stands in double quotes."))
    return words, "startend:quotation", {}


def _two(_: random.Random, __: str) -> Instruction:
    return "Offer two versions with ****** between them.", "combination:two_responses", {}


def _repeat(_: random.Random, request: str) -> Instruction:
    words = "Before you answer, copy the sentence above word for word."
    return words, "combination:repeat_prompt", {"prompt_to_repeat": request}


def _paragraphs(stream: random.Random, _: str) -> Instruction:
    number = stream.choice((2, 3))
    words = f"Write {number} paragraphs with *** on a line between them."
    return words, "length_constraints:number_paragraphs", {"num_paragraphs": number}


_KINDS: dict[str, Callable[[random.Random, str], Instruction]] = {
    "comma": _no_comma,
    "case-lower": _lowercase,
    "case-upper": _capitals,
    "length-few": _few_words,
    "length-many": _many_words,
    "length-sentences": _sentences,
    "word-existence": _existence,
    "word-frequency": _frequency,
    "forbidden": _forbidden,
    "letter": _letter,
    "highlights": _highlights,
    "shape-bullets": _bullets,
    "title": _title,
    "shape-sections": _sections,
    "json": _json,
    "placeholders": _placeholders,
    "end-postscript": _postscript,
    "end-phrase": _ending,
    "quotation": _quotation,
    "two": _two,
    "repeat": _repeat,
    "shape-paragraphs": _paragraphs,
}
"""Kind -> what writes the instruction; kinds of one group (before the dash) exclude each other."""
_ALONE = {"json", "quotation", "repeat", "two"}
"""Kinds that few others fit."""

# -- extraction ---------------------------------------------------------------------------------------------

_NAMES = (
    *("Anna", "Bilal", "Carla", "Dmitri", "Elena", "Farid", "Grace", "Hugo", "Irene", "Jonas", "Keiko"),
    *("Liam", "Mona", "Nadia", "Omar", "Paula", "Quinn", "Rosa", "Samir", "Tara", "Uma", "Viktor", "Wendy"),
)
_SURNAMES = ("Adler", "Brown", "Costa", "Diaz", "Evans", "Fischer", "Gupta", "Haas", "Ito", "Jensen", "Klein")
_CITIES = ("Lisbon", "Oslo", "Turin", "Lyon", "Porto", "Ghent", "Malmo", "Cork", "Graz", "Bern", "Tartu")
_JOBS = ("baker", "nurse", "pilot", "teacher", "carpenter", "lawyer", "gardener", "electrician", "librarian")
_ITEMS = ("lamps", "chairs", "notebooks", "cups", "blankets", "keyboards", "pencils", "mirrors", "bottles")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_EVENTS = ("concert", "lecture", "book fair", "cooking class", "chess tournament", "film night", "workshop")


def _extraction_row(stream: random.Random) -> Row:
    facts, text = stream.choice((_person, _order, _event))(stream)
    keys = stream.sample(list(facts), stream.choice((2, 3)))
    wanted = {key: facts[key] for key in keys}
    types = {key: "integer" if isinstance(value, int) else "string" for key, value in wanted.items()}
    shown = ", ".join(f'"{key}"' for key in keys)
    ask = stream.choice(
        (
            f"Extract the facts as a JSON object with the keys {shown}. Answer with JSON only.",
            f"Return only a JSON object that holds {shown} from the text.",
            f"Give {shown} as JSON, without any other words.",
        )
    )
    closed = {"type": "object", "required": keys, "additionalProperties": False}
    return {
        "prompt": f"{ask}\n\nText: {text}",
        "reference": json.dumps(wanted),
        "schema": {**closed, "properties": {key: {"type": kind} for key, kind in types.items()}},
        "exact_schema": {**closed, "properties": {key: {"const": value} for key, value in wanted.items()}},
    }


def _person(stream: random.Random) -> tuple[dict[str, Any], str]:
    name = f"{stream.choice(_NAMES)} {stream.choice(_SURNAMES)}"
    age, job, city = stream.randrange(21, 70), stream.choice(_JOBS), stream.choice(_CITIES)
    text = stream.choice(
        (
            f"{name}, {age}, works as a {job} in {city}.",
            f"At the age of {age}, {name} moved to {city} and became a {job}.",
            f"The {job} {name} lives in {city} and is {age} years old.",
        )
    )
    return {"name": name, "age": age, "job": job, "city": city}, text


def _order(stream: random.Random) -> tuple[dict[str, Any], str]:
    customer, item = stream.choice(_NAMES), stream.choice(_ITEMS)
    number, price, city = stream.randrange(2, 40), stream.randrange(5, 95), stream.choice(_CITIES)
    text = stream.choice(
        (
            f"{customer} ordered {number} {item} for {price} euros each, to be sent to {city}.",
            f"Please ship {number} {item} to {city}. {customer} pays {price} euros for each of them.",
            f"Order from {city}: {number} {item} at {price} euros apiece. The customer is {customer}.",
        )
    )
    return {"customer": customer, "item": item, "quantity": number, "price": price, "city": city}, text


def _event(stream: random.Random) -> tuple[dict[str, Any], str]:
    event, day, city = stream.choice(_EVENTS), stream.choice(_DAYS), stream.choice(_CITIES)
    guests, host = stream.randrange(12, 300), stream.choice(_NAMES)
    text = stream.choice(
        (
            f"On {day} {host} hosts a {event} in {city}; {guests} guests are expected.",
            f"{guests} people signed up for the {event} in {city} this {day}, hosted by {host}.",
            f"{host} invites {guests} guests to a {event}. It takes place on {day} in {city}.",
        )
    )
    return {"event": event, "day": day, "city": city, "guests": guests, "host": host}, text
