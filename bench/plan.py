"""What a run measures: prompts, settings and how often. Plain values, and the quick variant of them."""

from dataclasses import dataclass, replace
from typing import Self

from bench.samples import AUTO, BARE, ONE_BY_ONE, PLAIN, fixed
from outrider.cli.local_stack import Stack

PROMPTS = (
    "Once upon a time there was a miller who had",
    "The princess looked out of her window and saw",
    "A soldier came marching home from the war,",
    "Every night the golden bird came and",
)
QUICK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """One run; a turn goes through all prompts, and a prompt's cycle through all instruments and settings."""

    stack: Stack
    tokens: int
    turns: int
    temperatures: tuple[float, ...]
    prompts: tuple[str, ...] = PROMPTS
    draft_counts: tuple[int, ...] = (1, 2, 4, 6)
    row_counts: tuple[int, ...] = (1, 2, 3, 5, 7, 9)
    context_lens: tuple[int, ...] = (32, 128, 512, 1024)
    repeats: int = 2
    """Samples of each instrument in a cycle."""
    pings: int = 20
    """Pings on each stream in a cycle."""
    kv_tokens: int = 4096
    """Tokens that the cache of each bare engine holds."""
    memory_bytes: int | None = None
    """Size of the buffer that no cache holds; None finds it out."""

    @property
    def settings(self) -> list[str]:
        """Names of the settings of a cycle."""
        return [BARE, ONE_BY_ONE, PLAIN, *(fixed(count) for count in self.draft_counts), AUTO]

    def quick(self) -> Self:
        """A run of seconds that shows that everything works, and whose figures mean little."""
        return replace(
            self,
            tokens=min(self.tokens, QUICK_TOKENS),
            turns=1,
            prompts=self.prompts[:1],
            draft_counts=(2, 4),
            row_counts=(1, 3, 5),
            context_lens=(32, 128),
            memory_bytes=64 << 20,
        )
