"""What --tokenizer may name: a folder, or an id that the hub's local cache or the hub has."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolltape.replay.tokenizer import decoder, located, vocabulary_size
from rolltape.schema.errors import BadInput


def folder(path: Path) -> Path:
    """A tokenizer of two words."""
    tokenizers = pytest.importorskip("tokenizers")
    path.mkdir(parents=True)
    model = tokenizers.models.WordLevel({"zero": 0, "one": 1}, unk_token="zero")
    tokenizers.Tokenizer(model).save(str(path / "tokenizer.json"))
    return path


def test_a_folder_is_taken_from_here_or_from_beside_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = folder(tmp_path / "runs" / "setup" / "tokenizer")
    run = tmp_path / "runs" / "monday" / "first"
    assert located(str(made)) == str(made)
    assert located(str(made / "tokenizer.json")) == str(made)
    assert located("setup/tokenizer", run) == str(made)
    monkeypatch.chdir(tmp_path / "runs")
    assert located("setup/tokenizer") == "setup/tokenizer"
    assert decoder("setup/tokenizer")(1) == "one"


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("./nowhere", "There is no tokenizer folder ./nowhere, and it is no hub id"),
        ("/no/where", "There is no tokenizer folder /no/where, and it is no hub id"),
        ("a/b/c", "There is no tokenizer folder a/b/c, and it is no hub id"),
        ("", "holds no tokenizer.json"),
        ("empty", "empty holds no tokenizer.json"),
        ("file.txt", "file.txt is a file; give a folder"),
    ],
)
def test_what_is_neither_a_folder_nor_an_id_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").touch()
    with pytest.raises(BadInput, match=says):
        located(named)


def test_an_id_is_found_in_the_cache_and_else_refused_at_once_where_the_hub_is_not_to_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    made = folder(tmp_path / "models--someone--small" / "snapshots" / "abc")
    refs = tmp_path / "models--someone--small" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    assert located("someone/small", ask=False) == str(made)
    assert decoder(located("someone/small", ask=False))(1) == "one"
    with pytest.raises(BadInput, match=r"no tokenizer of that id in the hub's local cache; the hub was not asked"):
        located("someone/large", ask=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match="HF_HUB_OFFLINE is set"):
        located("someone/large")


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ('{"vocab_size": 151936}', 151936),
        ('{"text_config": {"vocab_size": 262208}}', 262208),
        ('{"vocab_size": null}', None),
        ('{"vocab_size": "151936"}', None),
        ('{"vocab_size": 0}', None),
        ("[1]", None),
        ("[" * 100_000, None),
        ("{", None),
    ],
)
def test_how_many_ids_a_model_has_is_what_its_config_says(tmp_path: Path, config: str, size: int | None) -> None:
    (tmp_path / "config.json").write_text(config)
    assert vocabulary_size("demo", str(tmp_path)) == size
    assert vocabulary_size(str(tmp_path / "none"), "someone/large") is None


def test_a_hub_that_cannot_be_reached_is_told_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    hub = pytest.importorskip("huggingface_hub")
    asked = list[str]()
    model_info = hub.HfApi.model_info

    def counted(_: object, named: str, **rest: object) -> object:
        asked.append(named)
        return model_info(hub.HfApi(endpoint="http://127.0.0.1:9"), named, **rest)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.HfApi, "model_info", counted)
    with pytest.raises(BadInput, match=r"no tokenizer of that id .* and the hub did not give one"):
        located("someone/large")
    assert asked == ["someone/large"]


def test_a_piece_of_a_byte_level_vocabulary_is_text_but_for_parts_of_characters(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    pieces = ["Ã", "±", "Ã±", "aĠÃ", "Ġ", "<end>"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="Ã")
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    text_of = decoder(str(tmp_path))
    assert [text_of(i) for i in range(len(pieces))] == ["\ufffd", "\ufffd", "ñ", "a \ufffd", " ", "<end>"]
    assert text_of(99) == "[99]"


def test_a_vocabulary_of_words_that_look_like_bytes_is_shown_as_it_is(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"Ã": 0}, unk_token="Ã")).save(str(tmp_path / "tokenizer.json"))
    assert decoder(str(tmp_path))(0) == "Ã"
