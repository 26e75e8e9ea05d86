"""How many tokens a text has: by a tokenizer, or by an estimate that says so.

Knows: tokenizers that may be installed. Must not know: what the texts are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

BYTES_PER_TOKEN = 4
"""The estimate: one token for each four bytes of UTF-8, begun ones counted. English has about four letters a token
(OpenAI's rule of thumb, help.openai.com, "What are tokens and how to count them"); scripts of three bytes a letter
come out at 0.75 tokens a letter."""


def estimated_tokens(text: str) -> int:
    """Bytes of UTF-8 over four, rounded up; 0 for no text."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


def token_counter(tokenizer: str | None) -> Callable[[str], int]:
    """What counts the tokens of a text.

    `tokenizer`: None for the estimate; an encoding of tiktoken (such as cl100k_base); or what transformers'
    AutoTokenizer takes, a folder or a name. Special tokens are not counted. Which packages happen to be installed
    changes nothing unless a tokenizer is asked for. Raises ValueError where there is no such tokenizer.
    """
    if tokenizer is None:
        return estimated_tokens
    try:
        tiktoken = importlib.import_module("tiktoken")
    except ImportError:
        tiktoken = None
    if tiktoken is not None and tokenizer in tiktoken.list_encoding_names():
        encoding = tiktoken.get_encoding(tokenizer)
        return lambda text: len(encoding.encode(text, disallowed_special=()))
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        installed = "" if tiktoken is None else f", and tiktoken has only {', '.join(tiktoken.list_encoding_names())}"
        raise ValueError(
            f"tokenizer {tokenizer!r}: needs transformers or tiktoken, which are not installed{installed}; without a "
            f"tokenizer, {BYTES_PER_TOKEN} bytes count as a token"
        ) from None
    try:
        found = transformers.AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer {tokenizer!r}: {str(error).splitlines()[0]}") from None
    return lambda text: len(found.encode(text, add_special_tokens=False))
