"""The whole command for drafting heads: files that engines load come of a text and a target, whenever it is killed."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.basics import grid
from support.runs import TINY_HEAD, start_training, train
from tokenizers import Tokenizer

from outrider.errors import InvalidRequest
from train_head import app
from training.data import IGNORED, encode, held_out_blocks, read_documents, targets_of
from training.head_files import METHODS

pytestmark = pytest.mark.grid

COMMAND = "train_head.py"
Made = dict[str, tuple[Path, str]]
"""Folder and output of a run by its method."""
OPTIONS = {
    "eagle3": ("--draft-vocab", "90", "--overlap-steps", "4", "--own-samples", "300", "--heads", "2"),
    "mtp": ("--steps-ahead", "2", "--mlp-size", "24"),
    "medusa": ("--steps-ahead", "3"),
    "mlp_speculator": ("--hidden-size", "24", "--steps-ahead", "3"),
}


def options_for(method: str, corpus: Path, pair: Path, out: Path) -> list[str | Path]:
    """A run of a few steps for the target of a tiny pair."""
    start = ["--corpus", corpus, "--target", pair / "target", "--out", out, "--method", method]
    return [*start, *TINY_HEAD, *OPTIONS[method]]


@pytest.fixture(scope="module")
def made(corpus: Path, trained: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Made:
    """For each method the folder of an unbroken run, and what it said."""
    runs = {}
    for method in METHODS:
        out = tmp_path_factory.mktemp("heads") / method
        code, output = train(*options_for(method, corpus, trained[0], out), command=COMMAND)
        assert code == 0, output
        runs[method] = (out, output)
    return runs


def tensors_of(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "head" / "model.safetensors")


def test_a_run_says_what_it_does_and_what_came_of_it(made: Made) -> None:
    """Sizes, samples, both stages with their losses, and a table with a row for each step ahead."""
    out, output = made["eagle3"]
    for words in (
        f"Making a head in {out}:",
        "3 documents",
        "held out",
        "eagle3: ",
        "taps 1, 90 ids, which are ",
        "samples: ",
        "head: 7 steps, 3 x 32 tokens",
        "head: step 6, loss ",
        "head-overlap: step 4, loss ",
        "tokens a pass at temperature 0 with 5 guesses",
    ):
        assert words in output
    assert [line.split()[1] for line in output.splitlines() if line.startswith("│")] == ["1", "2", "3", "4", "5"]
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "last_words",
    grid("head: step 4,", "samples: ", "head-overlap: step 2,"),
)
def test_a_killed_run_goes_on_to_the_same_weights(
    corpus: Path, trained: tuple[Path, str], made: Made, tmp_path: Path, last_words: str
) -> None:
    """The same command after SIGKILL ends with the same bits and the same table, and goes on from its checkpoint."""
    options = options_for("eagle3", corpus, trained[0], tmp_path / "head")
    with start_training(*options, command=COMMAND) as process:
        assert process.stdout is not None
        assert any(line.startswith(last_words) for line in process.stdout)
        os.kill(process.pid, signal.SIGKILL)
    code, output = train(*options, command=COMMAND)
    assert code == 0, output
    assert "Going on with a head" in output
    assert ("head: step 2," in output) == (last_words == "samples: ")
    expected, found = tensors_of(made["eagle3"][0]), tensors_of(tmp_path / "head")
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert output[output.index("How often") : output.index("The head:")] in made["eagle3"][1]


def test_a_finished_run_only_says_so_again(corpus: Path, trained: tuple[Path, str], made: Made) -> None:
    """The same table, and no step."""
    out, before = made["mtp"]
    code, output = train(*options_for("mtp", corpus, trained[0], out), command=COMMAND)
    assert code == 0, output
    assert "step 2," not in output
    assert output[output.index("How often") :] == before[before.index("How often") :]


def test_the_draft_vocabulary_is_what_the_text_says_most(corpus: Path, trained: tuple[Path, str], made: Made) -> None:
    """Offsets and reachable ids name the same rising ids; none that is left out was learnt more often."""
    tensors = tensors_of(made["eagle3"][0])
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    ids = tensors["d2t"] + torch.arange(90)
    assert (ids.diff() > 0).all()
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)
    assert tensors["lm_head.weight"].shape == (90, 16)
    token_ids = encode(
        Tokenizer.from_file(str(trained[0] / "target" / "tokenizer.json")), read_documents(corpus, "\n\n")
    )
    learnt = targets_of(token_ids, held_out_blocks(len(token_ids), 32, 1), 32)
    counts = torch.bincount(learnt[learnt != IGNORED], minlength=len(tensors["t2d"]))
    assert counts[ids].min() >= counts[~tensors["t2d"]].max()


def test_an_eagle3_head_says_all_that_a_loader_needs(made: Made, trained: tuple[Path, str]) -> None:
    """Its config in the layout of speculators; what is easily guessed wrong is written out."""
    out, _ = made["eagle3"]
    config = json.loads((out / "head" / "config.json").read_text())
    target = json.loads((trained[0] / "target" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert (config["draft_vocab_size"], config["target_hidden_size"]) == (90, 32)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1]
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert [config[flag] for flag in flags] == [False] * 4
    speculators = config["speculators_config"]
    assert speculators["algorithm"] == "eagle3"
    assert speculators["default_proposal_method"] in {each["proposal_type"] for each in speculators["proposal_methods"]}
    assert speculators["verifier"] == {
        "name_or_path": str(trained[0] / "target"),
        "architectures": target["architectures"],
    }
    layer = config["transformer_layer_config"]
    assert layer["rope_theta"] == target["rope_parameters"]["rope_theta"]
    assert (layer["hidden_size"], layer["num_attention_heads"], layer["num_key_value_heads"]) == (16, 2, 1)
    for name in ("vocab_size", "head_dim", "rms_norm_eps", "max_position_embeddings", "hidden_act"):
        assert layer[name] == target[name]
    tensors = tensors_of(out)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {
        "embed_tokens.weight": (target["vocab_size"], 16),
        "fc.weight": (16, 32),
        "layers.0.input_layernorm.weight": (16,),
        "layers.0.hidden_norm.weight": (16,),
        "layers.0.post_attention_layernorm.weight": (16,),
        "layers.0.self_attn.q_proj.weight": (32, 32),
        "layers.0.self_attn.k_proj.weight": (16, 32),
        "layers.0.self_attn.v_proj.weight": (16, 32),
        "layers.0.self_attn.o_proj.weight": (16, 32),
        "layers.0.mlp.gate_proj.weight": (42, 16),
        "layers.0.mlp.up_proj.weight": (42, 16),
        "layers.0.mlp.down_proj.weight": (16, 42),
        "norm.weight": (16,),
        "lm_head.weight": (90, 16),
        "d2t": (90,),
        "t2d": (target["vocab_size"],),
    }
    assert {each.dtype for name, each in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}


def test_the_other_methods_have_layouts_of_their_own(made: Made, trained: tuple[Path, str]) -> None:
    """MTP that of speculators, Medusa that of vLLM, an MLP speculator its authors'."""
    configs = {each: json.loads((made[each][0] / "head" / "config.json").read_text()) for each in METHODS}
    shapes = {each: {name: tuple(value.shape) for name, value in tensors_of(made[each][0]).items()} for each in METHODS}
    vocab_size = json.loads((trained[0] / "target" / "config.json").read_text())["vocab_size"]
    assert configs["mtp"]["speculators_model_type"] == "mtp"
    assert configs["mtp"]["transformer_layer_config"]["intermediate_size"] == 24
    norms = ("token_layernorm", "hidden_layernorm", "input_layernorm", "post_attention_layernorm", "final_layernorm")
    for name in norms:
        assert shapes["mtp"][f"mtp_layers.0.{name}.weight"] == (32,)
    assert shapes["mtp"]["mtp_layers.0.input_proj.weight"] == (32, 64)
    assert (configs["medusa"]["model_type"], configs["medusa"]["num_heads"]) == ("medusa", 3)
    assert configs["medusa"]["original_lm_head"] is True
    output = load_file(trained[0] / "target" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(tensors_of(made["medusa"][0])["lm_heads.0.weight"], output)
    for head in range(3):
        assert shapes["medusa"][f"blocks.{head}.layers.0.weight"] == (32, 32)
        assert shapes["medusa"][f"blocks.{head}.layers.0.bias"] == (32,)
    speculator = configs["mlp_speculator"]
    assert (speculator["model_type"], speculator["emb_dim"], speculator["inner_dim"]) == ("mlp_speculator", 32, 24)
    assert (speculator["n_predict"], speculator["tie_weights"], speculator["scale_input"]) == (3, True, True)
    assert shapes["mlp_speculator"] == {
        "speculator.emb.0.weight": (vocab_size, 24),
        "speculator.proj.0.weight": (24, 32),
        "speculator.proj.1.weight": (24, 24),
        "speculator.head.0.weight": (vocab_size, 24),
        "speculator.ln.0.weight": (24,),
        "speculator.ln.0.bias": (24,),
    }


def test_what_does_not_fit_is_refused(corpus: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
    """One sentence that names the option and its value, and no folder is left."""

    def refusal(*options: str) -> str:
        start = ("--corpus", corpus, "--target", trained[0] / "target", "--out", tmp_path / "out", "--preset", "tiny")
        with pytest.raises(InvalidRequest) as caught:
            app([str(each) for each in (*start, *options)], standalone_mode=False)
        assert not (tmp_path / "out").exists()
        return caught.value.message

    assert refusal("--method", "oracle").startswith("--method is 'oracle', but must be one of eagle3, mtp")
    assert refusal("--preset", "huge").startswith("--preset is 'huge'")
    assert refusal("--method", "medusa", "--taps", "1").startswith("--taps is '1', but must be left out")
    assert refusal("--method", "mtp", "--hidden-size", "8").startswith("--hidden-size is 8, but must be left out")
    assert refusal("--taps", "1,2").startswith("--taps is '1,2', but must be rising layer numbers")
    assert refusal("--taps", "one").startswith("--taps is 'one'")
    assert refusal("--hidden-size", "64").startswith("--hidden-size is 64, but must be at most 32")
    assert refusal("--heads", "3", "--kv-heads", "2").startswith(
        "--kv-heads is 2, but must be a divisor of the 3 heads"
    )
    assert refusal("--draft-vocab", "9000").startswith("--draft-vocab is 9000, but must be at most")
    assert refusal("--steps-ahead", "17").startswith("--steps-ahead is 17")
    assert refusal("--target", str(tmp_path)).startswith("--target is ")
