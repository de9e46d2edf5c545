"""Loading of tokenizers: as they were saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Both names of the class that reads ``tokenizer.json`` alone."""


def load_tokenizer(name: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the directory or hub id ``name``.

    If ``tokenizer_config.json`` names the generic class, the tokenizer is of this class and follows
    ``tokenizer.json``. For some models (``qwen2``) ``AutoTokenizer`` would choose the model's own class,
    which may split texts otherwise.

    Raises:
        OSError, ValueError: there is none.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    saved = Path(name) / "tokenizer_config.json"
    if saved.is_file() and (Path(name) / "tokenizer.json").is_file():
        settings = json.loads(saved.read_text(encoding="utf-8"))
        if settings.get("tokenizer_class") in _GENERIC and "auto_map" not in settings:
            return PreTrainedTokenizerFast.from_pretrained(name)
    own: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    return own
