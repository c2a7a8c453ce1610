"""Writes the model directory that the gateway reads: a tokenizer, configs and a chat template, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmcopy.errors import ConfigError, MissingDependencyError

from .families import FAMILIES, Family, TokenId

__all__ = ["family_named", "write_model_dir"]

END_OF_TEXT, TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MAX_CONTEXT_LENGTH = 65536


def family_named(name: str) -> Family:
    """The family of that name. Raises :class:`ConfigError` that lists the known ones."""
    try:
        return FAMILIES[name]
    except KeyError:
        raise ConfigError(f"family is {name!r}, want one of {', '.join(sorted(FAMILIES))}") from None


def write_model_dir(family: Family | str, directory: Path | str) -> Path:
    """Writes the five files into ``directory``, made when missing, and returns it. Blocks for milliseconds.

    The tokenizer is byte level without merges: text is one token per byte, and each control token of the family is
    one token. Raises :class:`ConfigError` for an unknown family, :class:`MissingDependencyError` without
    ``tokenizers``, OSError from the file system.
    """
    if isinstance(family, str):
        family = family_named(family)
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise MissingDependencyError("tokenizers is not installed: pip install 'mmcopy[demo]'") from error

    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    byte_symbols = sorted(pre_tokenizers.ByteLevel.alphabet())  # its own order changes from run to run
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(byte_symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = (END_OF_TEXT, TURN, END_OF_TURN, *family.tokens)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(target / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in control}

    def with_ids(value: Any) -> Any:
        if isinstance(value, TokenId):
            return ids[value]
        if isinstance(value, dict):
            return {key: with_ids(item) for key, item in value.items()}
        return value

    text_config = {
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": ids[END_OF_TURN],
        "max_position_embeddings": MAX_CONTEXT_LENGTH,
    }
    files = {
        "config.json": {
            "architectures": ["MmcopyDemo"],
            "model_type": family.name,
            "text_config": text_config,
            **with_ids(dict(family.config)),
        },
        "preprocessor_config.json": dict(family.processor),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TURN,
            "pad_token": END_OF_TEXT,
            "model_max_length": MAX_CONTEXT_LENGTH,
            "chat_template": chat_template(family),
        },
        "generation_config.json": {"eos_token_id": ids[END_OF_TURN]},
    }
    for name, content in files.items():
        (target / name).write_text(json.dumps(content, indent=2) + "\n")
    return target


def chat_template(family: Family) -> str:
    """A Jinja template that keeps picture parts.

    The gateway looks at the template to choose what it passes on: only a loop over ``message.content`` makes it
    pass on the parts of a message instead of their text.
    """
    cases = [("part.type in ['image', 'image_url']", repr(family.image_text))]
    if family.video_text is not None:
        cases.append(("part.type in ['video', 'video_url']", repr(family.video_text)))
    cases.append(("part.type == 'text'", "part.text"))
    branches = "".join(
        f"{{%- {'if' if i == 0 else 'elif'} {test} -%}}{{{{- {text} -}}}}" for i, (test, text) in enumerate(cases)
    )
    return (
        "{%- for message in messages -%}"
        f"{{{{- '{TURN}' + message.role + '\\n' -}}}}"
        "{%- if message.content is string -%}{{- message.content -}}"
        "{%- else -%}{%- for part in message.content -%}" + branches + "{%- endif -%}{%- endfor -%}{%- endif -%}"
        f"{{{{- '{END_OF_TURN}\\n' -}}}}"
        "{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{- '{TURN}assistant\\n' -}}}}{{%- endif -%}}"
    )
