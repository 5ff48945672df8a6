"""`python -m bench.one_layer FOLDER`: writes a model of one layer, with the embedded target's tokenizer.

Its forward costs next to nothing, so a stack of it shows what everything else costs: as target and as draft of
`outrider bench load` it gives the most rounds a second that gateway and services can do.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file

from bench.common import run_measurement
from outrider.model_names import embedded_model

HIDDEN, INNER, HEAD_DIM = 64, 128, 32
STANDARD_DEVIATION = 0.05
EMBEDDING_DEVIATION = 0.5  # so that some tokens are far more probable than others

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def write(folder: Annotated[Path, typer.Argument(help="Where to write it; made where it is missing.")]) -> None:
    """Writes a model of one layer with random weights, the same each time."""
    source = Path(embedded_model("target"))
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HIDDEN // HEAD_DIM,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    layer, dice = "model.layers.0.", torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens": (config["vocab_size"], HIDDEN),
        layer + "self_attn.q_proj": (HIDDEN, HIDDEN),
        layer + "self_attn.k_proj": (HEAD_DIM, HIDDEN),
        layer + "self_attn.v_proj": (HEAD_DIM, HIDDEN),
        layer + "self_attn.o_proj": (HIDDEN, HIDDEN),
        layer + "mlp.gate_proj": (INNER, HIDDEN),
        layer + "mlp.up_proj": (INNER, HIDDEN),
        layer + "mlp.down_proj": (HIDDEN, INNER),
    }
    norms = ("model.norm", layer + "input_layernorm", layer + "post_attention_layernorm")
    weights = {f"{name}.weight": torch.ones(HIDDEN, dtype=torch.bfloat16) for name in norms}
    for name, shape in shapes.items():
        deviation = EMBEDDING_DEVIATION if name == "model.embed_tokens" else STANDARD_DEVIATION
        weights[f"{name}.weight"] = (deviation * torch.randn(shape, generator=dice)).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    run_measurement(app, "one_layer")
