"""K by number of requests in the batch, as a table.

Source: vLLM 0.24 to 0.32, `num_speculative_tokens_per_batch_size` (dynamic speculative decoding).
"""

from __future__ import annotations

from collections.abc import Sequence


def draft_length_table(
    rows: Sequence[tuple[int, int, int]], num_speculative_tokens: int, max_num_seqs: int
) -> list[int]:
    """Entry n is K for a batch of n requests, 0 <= n <= max_num_seqs.

    Rows are (first, last, K), the first one starting at 1. Between rows and behind the last one the K of the row before
    holds. No K exceeds num_speculative_tokens.

    Raises:
        ValueError: no rows, a first row that does not start at 1, rows out of order or overlapping, a negative K.
    """
    if not rows or rows[0][0] != 1:
        raise ValueError(f"rows {list(rows)}: the first row must start at batch size 1")
    table = [min(rows[0][2], num_speculative_tokens)] * (max_num_seqs + 1)
    previous_last = 0
    for first, last, length in rows:
        if first <= previous_last or last < first or length < 0:
            raise ValueError(f"row {[first, last, length]}: rows are [first, last, K] in rising order, K >= 0")
        for size in range(first, max_num_seqs + 1):
            table[size] = min(length, num_speculative_tokens)
        previous_last = last
    return table
