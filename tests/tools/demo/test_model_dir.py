"""The model directory that the gateway reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from mmcopy.errors import ConfigError
from mmcopy.tools.demo.families import FAMILIES, TokenId
from mmcopy.tools.demo.model_dir import chat_template, write_model_dir


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_config_and_tokenizer_agree(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    directory = write_model_dir(name, tmp_path / "new" / "model")
    assert sorted(path.name for path in directory.iterdir()) == [
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text())
    assert config["model_type"] == name
    assert config["text_config"]["vocab_size"] == tokenizer.get_vocab_size()
    token_keys = [key for key, value in family.config.items() if isinstance(value, TokenId)]
    for key in token_keys:
        assert config[key] == tokenizer.token_to_id(family.config[key])
    assert all(len(tokenizer.encode(token, add_special_tokens=False).ids) == 1 for token in family.tokens)
    text = "a b\nü"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_placeholders_are_control_tokens() -> None:
    for family in FAMILIES.values():
        for text in filter(None, (family.image_text, family.video_text)):
            assert any(token in text for token in family.tokens)
            assert repr(text) in chat_template(family)


def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (write_model_dir("kimi_k25", tmp_path / name) for name in "ab")
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'pixtral', want one of deepseek_v41, .*qwen3_vl"):
        write_model_dir("pixtral", tmp_path / "model")
    assert not (tmp_path / "model").exists()
