"""Ids -> text that is safe to show: one piece a token, nothing invisible, nothing that a browser would act on."""

from __future__ import annotations

import html
import unicodedata
from pathlib import Path


class TokenText:
    """Text of single tokens, from a folder with a tokenizer.json; without one, the ids."""

    def __init__(self, folder: Path | None = None):
        self._tokenizer = None
        if folder is not None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    @property
    def known(self) -> bool:
        return self._tokenizer is not None

    def __call__(self, token: int) -> str:
        """Without a tokenizer, or for an id it does not have, the id in brackets; a question mark where no id is known."""
        if token < 0:
            return "[?]"
        piece = self._tokenizer.id_to_token(token) if self._tokenizer else None
        if piece is None:
            return f"[{token}]"
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        # SentencePiece marks a leading space, and decoding a token by itself drops it as the start of a text.
        if piece.startswith("\u2581") and not text.startswith(" "):
            text = " " + text
        return text or piece


def visible(text: str) -> str:
    """HTML of model text. Line breaks and tabs get a sign beside them; control and direction characters are shown as
    their number: a right-to-left override inside a token would turn the page around it."""
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character == "\n":
        return "\u21b5\n"
    if character == "\t":
        return "\u21e5\t"
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"\\u{{{ord(character):x}}}"
    return html.escape(character, quote=True)
