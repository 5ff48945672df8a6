"""What a run is: its settings, and the stages that follow from them. Trains nothing."""

from dataclasses import dataclass

from training.shapes import PRESETS, Preset
from training.stage import Portion, Stage

STEPS = {"target": 2400, "target-long": 240, "draft": 1500, "draft-long": 240}
SHORT_RATE = 3e-3
# A trained target forgets at more; a draft's few weights follow their teacher at any rate.
LONG_RATES = {"target": 6e-4, "draft": 2e-3}


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that the weights depend on, beside the kind of device; another value is another run."""

    corpus: str
    """Digest of the documents."""
    preset_name: str
    from_pair: str | None
    """Digest of the pair to start from."""
    seed: int
    batch: int
    """Short blocks a step."""
    long_batch: int
    steps: dict[str, int]
    """By stage."""

    @property
    def preset(self) -> Preset:
        """The sizes."""
        return PRESETS[self.preset_name]

    def stages(self, role: str) -> list[Stage]:
        """What a model of this role goes through; short blocks are behind it when it comes from another pair."""
        short, long = role, f"{role}-long"
        blocks = Portion(self.batch, self.preset.block_len)
        long_blocks = Portion(self.long_batch, self.preset.context_len)
        stages = [
            Stage(short, self.steps[short], SHORT_RATE, (blocks,)),
            Stage(long, self.steps[long], LONG_RATES[role], (long_blocks, blocks)),
        ]
        return stages if self.from_pair is None else stages[1:]

    def values(self) -> dict[str, object]:
        """The settings under the names of their options, as far as they have one."""
        steps = {f"--{_option(stage)}": count for stage, count in self.steps.items()}
        return {
            "--corpus": self.corpus,
            "--preset": self.preset_name,
            "--from-pair": self.from_pair,
            "--seed": self.seed,
            "--batch": self.batch,
            "--long-batch": self.long_batch,
            **steps,
        }


def _option(stage: str) -> str:
    role, _, long = stage.partition("-")
    return f"{long}-{role}-steps" if long else f"{role}-steps"
