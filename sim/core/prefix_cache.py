"""Which block holds which content: hash to blocks, first inserted first.

Knows nothing of free queues or references. Two blocks may hold the same content (vLLM does not deduplicate); a lookup
finds the one inserted first.

Hashes lie on pages of 64 consecutive numbers, so that blocks whose hashes follow each other come and go without a look
into a dictionary for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sim.core.block_hashes import PAGE_BITS, BlockHash, BlockHashes

if TYPE_CHECKING:
    from mypy_extensions import i64

_SIZE: Final = 1 << PAGE_BITS


class Page:
    """Up to 64 consecutive hashes, and the block that each was given to first."""

    __slots__ = ("blocks", "number")

    def __init__(self, number: int) -> None:
        self.number: i64 = number
        """Its hashes over 64."""
        self.blocks: list[int] = []
        """By place on the page, which is the hash's last six bits, as far as there are any; 0 for none."""


class PrefixCache:
    """Hash to block, and block to hash."""

    __slots__ = ("_duplicate_of", "_duplicates", "_num_hashed", "_pages", "pages")

    def __init__(self, num_blocks: int) -> None:
        self.pages: list[Page | None] = [None] * num_blocks
        """By block id: the page that its hash is on, None if it has no hash."""
        self._pages: dict[int, Page] = {}
        """Those with a block on them, by number."""
        self._duplicates: dict[BlockHash, list[int]] = {}
        """Blocks beside the one that is on the page, in order of insertion."""
        self._duplicate_of: dict[int, BlockHash] = {}
        """The hash of each of these."""
        self._num_hashed = 0

    def __len__(self) -> int:
        """Number of blocks that have a hash."""
        return self._num_hashed

    @property
    def hashes(self) -> list[BlockHash | None]:
        """By block id: the hash of its content, None if it has none. For checks and tests."""
        found: list[BlockHash | None] = [None] * len(self.pages)
        for page in self._pages.values():
            for place, block in enumerate(page.blocks):
                if block:
                    found[block] = (page.number << PAGE_BITS) + place
        for block, block_hash in self._duplicate_of.items():
            found[block] = block_hash
        return found

    def find(self, block_hash: BlockHash) -> int | None:
        """The block that holds this content, the first inserted if several do."""
        wanted = BlockHashes()
        wanted.append(block_hash)
        found = self.find_all(wanted, 1)
        return found[0] if found else None

    def find_all(self, block_hashes: BlockHashes, count: int) -> list[int]:
        """The blocks that hold the first `count` contents, up to the first that none does."""
        found: list[int] = []
        run = 0
        while len(found) < count:
            first = len(found)
            if block_hashes.ends[run] == first:
                run += 1
            block_hash = block_hashes.shifts[run] + first
            page = self._pages.get(block_hash >> PAGE_BITS)
            if page is None:
                break
            place = block_hash & (_SIZE - 1)
            length = min(min(block_hashes.ends[run], count) - first, _SIZE - place)
            blocks = page.blocks[place : place + length]
            if 0 in blocks:
                del blocks[blocks.index(0) :]
            found += blocks
            if len(blocks) < length:
                break
        return found

    def insert(self, blocks: list[int], block_hashes: BlockHashes, index: int = 0, before: int = 0) -> None:
        """Give different blocks their hashes, in order: the first block the hash at `index`.

        `before`: a block with the hash in front of that, if there is one; its page is likely to be theirs.

        Raises:
            ValueError: a block has one already; nothing has been changed.
        """
        pages = self.pages
        for block in blocks:
            if pages[block] is not None:
                raise ValueError(f"block {block} has a hash already")
        ends, shifts = block_hashes.ends, block_hashes.shifts
        total: i64 = len(blocks)
        first: i64 = 0
        run: i64 = block_hashes.run_of(index)
        page = pages[before]
        while first < total:
            at: i64 = index + first
            behind: i64 = ends[run]
            if at == behind:
                run += 1
                behind = ends[run]
            block_hash: i64 = shifts[run] + at
            place = block_hash & (_SIZE - 1)
            number = block_hash >> PAGE_BITS
            if page is None or page.number != number:
                fresh = Page(number)
                page = self._pages.setdefault(number, fresh)
            length = behind - at
            if length > _SIZE - place:
                length = _SIZE - place
            if length > total - first:
                length = total - first
            if length == 1 and place == len(page.blocks):
                block = blocks[first]
                page.blocks.append(block)
                pages[block] = page
            else:
                part = blocks[first : first + length]
                if place == len(page.blocks):
                    page.blocks.extend(part)
                else:
                    self._insert_among(page, place, part)
                for block in part:
                    pages[block] = page
            first += length
        self._num_hashed += total

    def _insert_among(self, page: Page, place: int, blocks: list[int]) -> None:
        """Put blocks on a page of which something from `place` on is missing, or there already."""
        known = page.blocks
        known += [0] * (place - len(known))
        for block in blocks:
            if place == len(known):
                known.append(block)
            elif known[place] == 0:
                known[place] = block
            else:
                block_hash = (page.number << PAGE_BITS) + place
                self._duplicates.setdefault(block_hash, []).append(block)
                self._duplicate_of[block] = block_hash
            place += 1

    def evict(self, blocks: list[int]) -> None:
        """Take different blocks' hashes away.

        Raises:
            KeyError: a block has none; nothing has been changed.
        """
        pages = self.pages
        for block in blocks:
            if pages[block] is None:
                raise KeyError(f"block {block} has no hash")
        self.evict_hashed(blocks)

    def evict_hashed(self, blocks: list[int]) -> None:
        """`evict` for those who know that every block has a hash."""
        pages = self.pages
        count: i64 = len(blocks)
        at: i64 = 0
        while at < count:
            block = blocks[at]
            page = pages[block]
            assert page is not None
            if self._duplicate_of and self._evict_duplicate(page, block):
                pages[block] = None
                at += 1
                continue
            known = page.blocks
            left: i64 = len(known)
            while at < count and left > 0 and known[left - 1] == blocks[at]:
                pages[blocks[at]] = None  # Nearly always: the end of what ended first is evicted first.
                left -= 1
                at += 1
                if self._duplicate_of:
                    break
            if left == len(known):
                pages[block] = None
                known[known.index(block)] = 0
                at += 1
            while left > 0 and known[left - 1] == 0:
                left -= 1
            if left:
                del known[left:]
            else:
                del self._pages[page.number]
        self._num_hashed -= count

    def _evict_duplicate(self, page: Page, block: int) -> bool:
        """Evict a block whose content others hold as well; False, and nothing changed, if it is the only one."""
        block_hash = self._duplicate_of.pop(block, None)
        if block_hash is not None:
            others = self._duplicates[block_hash]
            others.remove(block)
        else:
            place = page.blocks.index(block)
            block_hash = (page.number << PAGE_BITS) + place
            found = self._duplicates.get(block_hash)
            if found is None:
                return False
            others = found
            page.blocks[place] = others.pop(0)
            del self._duplicate_of[page.blocks[place]]
        if not others:
            del self._duplicates[block_hash]
        return True

    def clear(self) -> list[int]:
        """Take all hashes away; returns the blocks that had one, by id."""
        had = [block for block, page in enumerate(self.pages) if page is not None]
        for block in had:
            self.pages[block] = None
        self._pages.clear()
        self._duplicates.clear()
        self._duplicate_of.clear()
        self._num_hashed = 0
        return had
