"""A pair of models with eight tokens, all of whose outputs can be counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.engine.tiny_models import write_llama_pair

if TYPE_CHECKING:
    from pathlib import Path

CHARACTERS = ("<eos>", "<bos>", "a", "b", "c", "d", "e", "f")
VOCAB = len(CHARACTERS)


def write_small_pair(folder: Path, *, noise: float, seed: int = 2) -> tuple[Path, Path]:
    """Write a target over `CHARACTERS` and a draft that is it plus weight noise."""
    pair = write_llama_pair(
        folder,
        noise=noise,
        seed=seed,
        vocab_size=VOCAB,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=64,
        eos_token_id=0,
        pad_token_id=None,
    )
    for model_folder in pair:
        _make_tokenizer().save_pretrained(model_folder)
    return pair


def _make_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character; grammars need one."""
    ids = {character: token_id for token_id, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>"
    )
