"""How many of a model's ids are words."""

from pathlib import Path

from tokenizers import Tokenizer


def tokenizer_size(folder: str | Path) -> int | None:
    """One more than the largest id of the folder's `tokenizer.json`; None where there is none.

    Rows of the output head from there on are padding (Qwen3.5: 248,077 words, 248,320 rows).
    """
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        return None
    return max(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).values()) + 1
