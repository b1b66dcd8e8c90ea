"""A tokenizer by what every command calls it: a folder that holds one, or an id on the Hugging Face Hub.

An id is looked for in the local cache first, which asks no network. What the cache has not is asked of the hub once: a
machine without network is told so in seconds, and not after every retry of every file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rolltape.schema.errors import BadInput, MissingExtra, install
from rolltape.schema.jsontext import read_json
from rolltape.schema.storage import AnyPath

HELP = "Folder or hub id of the tokenizer"
FILES = ("tokenizer.json", "tokenizer_config.json")
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SECONDS = 10.0


def located(named: str, beside: AnyPath | None = None, *, ask: bool = True) -> str:
    """The folder of a tokenizer, or its id where that is to be downloaded, which the hub has said it can be.

    `beside`: a run; a relative path that was recorded was meant from a folder that the run lies in, as a rule. `ask`:
    whether the hub may be asked. A file tokenizer.json stands for its folder.

    Raises BadInput where `named` is neither a folder nor an id, or the hub cannot be asked.
    """
    path = Path(named).expanduser()
    if path.is_file() and path.name == FILES[0]:
        return str(path.parent)
    above = beside.absolute().parents if isinstance(beside, Path) and not path.is_absolute() else ()
    folders = [path, *(folder / path for folder in above)]
    found = next((folder for folder in folders if folder.is_dir()), None)
    if found is not None:
        if any((found / name).is_file() for name in FILES):
            return str(found)
        raise BadInput(f"{found} holds no tokenizer.json; give a folder that holds a tokenizer, or a hub id.")
    if path.exists():
        raise BadInput(f"{named} is a file; give a folder that holds a tokenizer, or a hub id.")
    if not _ID.fullmatch(named) or named.startswith("."):
        raise BadInput(
            f"There is no tokenizer folder {named}, and it is no hub id; give the tokenizer with --tokenizer."
        )
    return _of_hub(named, ask)


def _of_hub(named: str, ask: bool) -> str:
    try:
        import huggingface_hub as hub
        from huggingface_hub import constants
    except ImportError as error:
        raise MissingExtra(
            f"There is no tokenizer folder {named}; hub ids need the extra 'live': {install('live')}."
        ) from error
    for name in FILES:
        if file := _cached(named, name):
            return str(file.parent)
    neither = f"There is no tokenizer folder {named}, and no tokenizer of that id in the hub's local cache"
    if constants.HF_HUB_OFFLINE or not ask:
        why = "HF_HUB_OFFLINE is set, so the hub was not asked" if constants.HF_HUB_OFFLINE else "the hub was not asked"
        raise BadInput(f"{neither}; {why}. Give a folder with --tokenizer.")
    try:
        hub.HfApi().model_info(named, timeout=_SECONDS)
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        raise BadInput(
            f"{neither}, and the hub did not give one ({type(error).__name__}: {said[0]}). Give a folder with --tokenizer."
        ) from error
    return named


def vocabulary_size(*named: str) -> int | None:
    """How many token ids a model has, as the first config.json says that lies at one of these: folders, or ids in the local
    cache. None where there is none; asks no network.

    A tokenizer does not say it: models round up what their tokenizers need.
    """
    for place in named:
        file = Path(place).expanduser() / "config.json"
        if not file.is_file():
            file = _cached(place, "config.json") or file
        with suppress(OSError, ValueError, AttributeError):
            config = read_json(file.read_bytes())
            size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
            if type(size) is int and size > 0:
                return size
    return None


def _cached(named: str, name: str) -> Path | None:
    """A file of a hub id in the local cache."""
    with suppress(ImportError, ValueError):
        import huggingface_hub as hub
        from huggingface_hub import constants

        if isinstance(file := hub.try_to_load_from_cache(named, name, cache_dir=constants.HF_HUB_CACHE), str):
            return Path(file)
    return None


def quiet() -> None:
    """Keep what transformers and the hub's client have to say of themselves out of a command's output.

    To be called before they are imported; TRANSFORMERS_VERBOSITY and HF_HUB_VERBOSITY say otherwise.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")


def decoder(place: str) -> Callable[[int], str]:
    """A function that gives the text of a token id, by the tokenizer that `located` found.

    Raises MissingExtra where the package tokenizers is missing, BadInput where there is no tokenizer.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtra(
            f"--tokenizer needs the package tokenizers, which is not installed: {install('live')}."
        ) from error
    file = file_of(place)
    try:
        tokenizer = Tokenizer.from_file(file)
    except Exception as error:
        raise BadInput(f"{file}: no readable tokenizer ({error}).") from error
    return lambda token: _text(tokenizer, token)


def file_of(place: str) -> str:
    """The tokenizer.json of a folder or an id that `located` found. Raises BadInput where it has none."""
    if not Path(place).is_dir():
        import huggingface_hub as hub

        try:
            return str(hub.hf_hub_download(place, FILES[0]))
        except Exception as error:
            raise BadInput(f"The hub gave no tokenizer.json of {place} ({type(error).__name__}).") from error
    file = Path(place) / FILES[0]
    if not file.is_file():
        raise BadInput(f"{file} does not exist; expected a folder that holds a tokenizer.json.")
    return str(file)


def _text(tokenizer: Any, token: int) -> str:
    text = str(tokenizer.decode([token], skip_special_tokens=False))
    if text and "\ufffd" not in text:
        return text
    piece = tokenizer.id_to_token(token)
    return f"[{token}]" if piece is None else _of_bytes(tokenizer, str(piece))


def _of_bytes(tokenizer: Any, piece: str) -> str:
    """A piece of a byte-level vocabulary as text, each byte that is only part of a character as U+FFFD; another as it is."""
    if "ByteLevel" not in repr(tokenizer.decoder) or any(c not in _BYTES for c in piece):
        return piece
    return bytes(_BYTES[c] for c in piece).decode(errors="replace")


def _byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for: itself where it is printable, else one from 256 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()
