"""The options of models/train.py: their help and their ranges. Knows no defaults and no effects."""

from pathlib import Path
from typing import Annotated

import typer

from outrider.process.options import between
from training.plan import STEPS
from training.shapes import PRESETS

_COUNT = between(1, 1_000_000_000)

Corpus = Annotated[Path, typer.Option(help="UTF-8 text, plain or as .xz or .gz.")]
Out = Annotated[Path, typer.Option(help="Folder of the pair, and of what a stopped run needs to go on.")]
FromPair = Annotated[Path | None, typer.Option(help="Folder of a pair; only its context is extended, nothing else.")]
PresetName = Annotated[str, typer.Option(help=f"Sizes of a new pair, and of all blocks: {', '.join(PRESETS)}.")]
Separator = Annotated[
    str, typer.Option(show_default=False, help="What stands between documents; by default a blank line.")
]
TargetSteps = Annotated[
    int | None, typer.Option(callback=_COUNT, help=f"Of a new target on short blocks; by default {STEPS['target']:,}.")
]
LongTargetSteps = Annotated[
    int | None, typer.Option(callback=_COUNT, help=f"Of the target on long blocks; by default {STEPS['target-long']}.")
]
DraftSteps = Annotated[
    int | None, typer.Option(callback=_COUNT, help=f"Of a new draft on short blocks; by default {STEPS['draft']:,}.")
]
LongDraftSteps = Annotated[
    int | None, typer.Option(callback=_COUNT, help=f"Of the draft on long blocks; by default {STEPS['draft-long']}.")
]
Batch = Annotated[int, typer.Option(callback=between(1, 65536), help="Short blocks a step.")]
LongBatch = Annotated[int, typer.Option(callback=between(1, 65536), help="Long blocks a step, beside the short ones.")]
Seed = Annotated[
    int, typer.Option(callback=between(0, 1 << 62), help="Of first weights, order and held-out blocks of the text.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Threads = Annotated[int | None, typer.Option(callback=between(1, 1024), help="On the CPU; by default one a core.")]
CheckpointEvery = Annotated[int, typer.Option(callback=_COUNT, help="Steps between checkpoints.")]
