"""Language detection by script, and by common words where languages share a script.

Small and exact enough to check "answer in Hindi", without a model. Limits: a language that is not listed
passes for the listed one it resembles; texts of fewer than about five words are uncertain.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

_SCRIPTS: Mapping[str, tuple[int, int]] = {
    "latin": (0x0041, 0x024F),
    "greek": (0x0370, 0x03FF),
    "cyrillic": (0x0400, 0x052F),
    "hebrew": (0x0590, 0x05FF),
    "arabic": (0x0600, 0x077F),
    "devanagari": (0x0900, 0x097F),
    "bengali": (0x0980, 0x09FF),
    "gurmukhi": (0x0A00, 0x0A7F),
    "gujarati": (0x0A80, 0x0AFF),
    "tamil": (0x0B80, 0x0BFF),
    "telugu": (0x0C00, 0x0C7F),
    "kannada": (0x0C80, 0x0CFF),
    "malayalam": (0x0D00, 0x0D7F),
    "thai": (0x0E00, 0x0E7F),
    "kana": (0x3040, 0x30FF),
    "han": (0x4E00, 0x9FFF),
    "hangul": (0xAC00, 0xD7AF),
}
_VIETNAMESE = (0x1EA0, 0x1EFF)
"""Latin letters with two marks, written by Vietnamese alone."""

_ONE_LANGUAGE: Mapping[str, str] = {
    "greek": "el",
    "hebrew": "he",
    "bengali": "bn",
    "gurmukhi": "pa",
    "gujarati": "gu",
    "tamil": "ta",
    "telugu": "te",
    "kannada": "kn",
    "malayalam": "ml",
    "thai": "th",
    "kana": "ja",
    "han": "zh",
    "hangul": "ko",
}

_COMMON_WORDS: Mapping[str, Mapping[str, str]] = {
    "latin": {
        "en": "the and of to in is that it for was on are with as be this have from or not you i at by",
        "de": "der die das und ist nicht ich ein eine zu den mit auf für von im dem sich es auch sie wir wie",
        "fr": "le la les des et est une un pas que je il dans pour sur avec au ce qui vous nous sont plus",
        "es": "el la los las y es una un que en de por con para no se su como más pero lo al muy está",
        "it": "il la che di e è un una per non con sono del della gli le mi si come più anche ma nel questo",
        "pt": "o a os as e é um uma que de do da em não para com por se mais como mas no na são você",
        "vi": "là và của có không một người trong cho được với các những này tôi đã để khi như",
        "fi": "ja on ei se että hän oli mutta ovat kun myös niin minä sinä tämä joka olla hyvin kuin",
        "sw": "na ya wa ni kwa la za katika kuwa hii yake sana mimi wewe hiyo ambayo lakini kama pia",
        "nl": "de het een en van ik niet dat die is in op te zijn met voor maar ook er aan wij",
        "pl": "i w nie na się z jest że do to jak ale o po co tak za od przez dla są",
    },
    "cyrillic": {
        "ru": "и в не на что он с как это по но из у за то все так его было она мы вы я для бы от ты только",
        "bg": "и на е да се за от не с по че са като в ще това ми си до или но към много може няма той тя те",
        "uk": "і в не на що з як це та до але за він у від так його було вона ми ви я для ти або є",
    },
    "arabic": {
        "ar": "في من على إلى أن هذا هذه التي الذي مع كان لا ما هو هي عن كل لم قد بعد و ذلك",
        "fa": "و در به از که این است را با برای آن یک می ها خود تا بر هم من شما بود شد های",
        "ur": "کے کی کا میں ہے اور سے کو پر نے یہ کہ ہیں تھا اس ایک ہم آپ نہیں بھی کر ہو",
    },
    "devanagari": {
        "hi": "है के का की में और से को पर ने यह कि हैं था इस एक हम आप नहीं भी कर हो मैं",
        "mr": "आहे आणि च्या ची चा मध्ये ने हे या तो ती ते नाही मी आम्ही तुम्ही आहेत होते केले पण एक करण्यासाठी",
        "ne": "छ र को मा ले का हुन् यो त्यो हो छन् गर्न पनि लागि एक तपाईं हामी म गर्ने भएको थियो",
    },
}
_WORDS = {
    script: {language: frozenset(words.split()) for language, words in languages.items()}
    for script, languages in _COMMON_WORDS.items()
}
LANGUAGES = frozenset(
    {*_ONE_LANGUAGE.values(), *(language for words in _WORDS.values() for language in words)}
)
"""Codes that can be detected (ISO 639-1)."""


def detect_language(text: str) -> str:
    """Return the ISO 639-1 code of the language most of ``text`` is in, empty if it has no letters.

    A text without any common word is in the first language of its script (English): about a tenth of real
    English answers, lists above all, have none.

    >>> detect_language("Das ist nicht der Tag, und ich bin müde.")
    'de'
    """
    scripts = Counter(script for char in text if (script := _script(ord(char))))
    if not scripts:
        return ""
    if scripts["kana"]:
        scripts["kana"] += scripts.pop("han", 0)  # Japanese mixes both
    script = scripts.most_common(1)[0][0]
    if script in _ONE_LANGUAGE:
        return _ONE_LANGUAGE[script]
    if script == "latin" and _share_of_vietnamese(text) > 0.02:
        return "vi"
    words = re.findall(r"[^\s\d.,;:!?\"'()\[\]{}*#<>\u0964\u060c\u061f_/-]+", text.lower())
    found = {language: sum(word in common for word in words) for language, common in _WORDS[script].items()}
    return max(found, key=lambda language: found[language])


def _script(code: int) -> str:
    if _VIETNAMESE[0] <= code <= _VIETNAMESE[1]:
        return "latin"
    if not chr(code).isalpha():
        return ""
    return next((name for name, (low, high) in _SCRIPTS.items() if low <= code <= high), "")


def _share_of_vietnamese(text: str) -> float:
    letters = sum(char.isalpha() for char in text)
    return sum(_VIETNAMESE[0] <= ord(char) <= _VIETNAMESE[1] for char in text) / max(letters, 1)
