"""A head of the trainer's own making that has learnt nothing yet, for any target that the trainer reads."""

from pathlib import Path

import torch

from training.head_files import HeadFiles
from training.head_run import HeadSettings, new_head, shape_of, taps_of
from training.model import trained_model


def write_untrained_head(target: Path, folder: Path, seed: int = 1) -> Path:
    """An EAGLE-3 head as wide as its target, over every second id; returns its folder."""
    model = trained_model("--target", target)
    config = model.config
    settings = HeadSettings(steps_ahead=2, hidden_size=config.hidden_size)
    files = HeadFiles(
        method="eagle3",
        shape=shape_of(settings, model),
        taps=taps_of(settings, config.num_hidden_layers),
        draft_ids=torch.arange(0, config.vocab_size, 2),
        target=target.name,
        target_config=config,
    )
    output = model.get_output_embeddings().weight.detach()
    head = new_head(files, model.get_input_embeddings().weight.detach(), output, seed)
    files.write(head.state_dict(), output, folder)
    return folder
