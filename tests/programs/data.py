"""Small data in the formats that programs read: no program fetches any."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np


def nothing(folder: Path) -> None:
    """For programs that make their own."""


def mnist(folder: Path) -> None:
    """MNIST's four files below `MNIST/raw`, `data/MNIST/raw`: sklearn's digits, drawn larger. 192 to train on and 64 to test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.pad(np.kron(digits.images, np.ones((3, 3))), ((0, 0), (2, 2), (2, 2))) * 15
    for root in (folder, folder / "data"):
        raw = root / "MNIST" / "raw"
        raw.mkdir(parents=True)
        for kind, begin, end in (("train", 0, 192), ("t10k", 192, 256)):
            count = end - begin
            pixels = images[begin:end].astype(np.uint8).tobytes()
            (raw / f"{kind}-images-idx3-ubyte").write_bytes(struct.pack(">iiii", 0x803, count, 28, 28) + pixels)
            labels = digits.target[begin:end].astype(np.uint8).tobytes()
            (raw / f"{kind}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 0x801, count) + labels)


def pictures(folder: Path) -> None:
    """`pictures/train` and `pictures/val` with a folder a class, as torchvision's ImageFolder reads them: noise in two colours."""
    from PIL import Image

    draws = np.random.default_rng(0)
    for part, count in (("train", 24), ("val", 8)):
        for number, name in enumerate(("blue", "red")):
            place = folder / "pictures" / part / name
            place.mkdir(parents=True)
            for index in range(count):
                pixels = draws.integers(0, 128, (32, 32, 3), dtype=np.uint8)
                pixels[:, :, 2 * (1 - number)] += 100
                Image.fromarray(pixels).save(place / f"{index}.png")


def names(folder: Path) -> None:
    """`names/LANGUAGE.txt`, a name a line, of three invented languages."""
    draws = np.random.default_rng(0)
    place = folder / "data" / "names"
    place.mkdir(parents=True)
    for language, letters in (("English", "abdehlnorst"), ("Italian", "aeiolnrtg"), ("Polish", "kszwycjmi")):
        words = ["".join(draws.choice(list(letters), draws.integers(4, 9))).title() for _ in range(60)]
        (place / f"{language}.txt").write_text("\n".join(words) + "\n")


def model(folder: Path) -> None:
    """`tiny`, a GPT-2 with a tokenizer of words, `tiny-bert`, and `text/train.jsonl`, sentences of these words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<pad>"}
    words = ["<pad>", "<eos>", "the", "a", "cat", "dog", "sees", "hears", "big", "small", "old", "new", "house", "tree", "and", "or", "not"]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=plain, **special)
    fast.save_pretrained(folder / "tiny")
    import torch

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(words), n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(folder / "tiny")
    fast.save_pretrained(folder / "tiny-bert")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(folder / "tiny-bert")
    draws = np.random.default_rng(0)
    (folder / "text").mkdir()
    lines = [json.dumps({"text": " ".join(draws.choice(words[2:], draws.integers(4, 12)))}) for _ in range(64)]
    (folder / "text" / "train.jsonl").write_text("\n".join(lines) + "\n")


MAKERS: dict[str, Callable[[Path], None]] = {"": nothing, "mnist": mnist, "model": model, "names": names, "pictures": pictures}
"""By the names that programs.toml has."""
