"""Heads that are refused: what is no head here, and what does not fit, each in one sentence and before it is loaded."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.heads import tiny_heads
from support.heads.tiny_heads import (
    DRAFT_VOCAB,
    FLAT,
    HIDDEN,
    VOCAB,
    Writer,
    change,
    eagle1,
    eagle1_speculators,
    eagle3,
    eagle3_speculators,
    eagle3_whole,
    mimo,
    modelopt,
    mtp_speculators,
    random_tensors,
    specforge,
    speculators_config,
    tiny_target,
    write_head,
)
from torch import Tensor

from outrider.engine.heads import checkpoint
from outrider.engine.heads.checkpoint import read_head
from outrider.engine.heads.layouts import read_eagle1
from outrider.engine.ops.reference import ReferenceOps
from outrider.errors import ModelRefused
from outrider.model_files.drafter_layouts import DSPARK, NOT_SERVED, P_EAGLE

CPU = torch.device("cpu")
Json = dict[str, object]


def refusal(folder: Path, theta: float | None = None) -> str:
    """What read_head says, with {folder} for the folder."""
    with pytest.raises(ModelRefused) as caught:
        read_head(folder, tiny_target(), theta)
    return caught.value.message.replace(str(folder), "{folder}")


def named(*names: str, **config: object) -> Writer:
    """A folder with tensors of these names."""
    return lambda folder: write_head(folder, FLAT | config, random_tensors(dict.fromkeys(names, (2, 2)), 0))


def of_type(kind: str) -> Writer:
    """A checkpoint of speculators."""
    return lambda folder: write_head(folder, speculators_config(kind), random_tensors({"fc.weight": (2, 2)}, 0))


LATENT = "an MTP layer of DeepSeek-V3 or GLM-4.5, which has latent attention (MLA) and experts, which are not served"
GATED = "an MTP layer of Qwen3-Next or Qwen3.5, whose attention is gated and whose norms are centred at zero"
CELLS = "a Gumiho or Arctic speculator, whose cells are others than their names say"
STATE = "a training run's state, with names of its wrappers: export the head first"
BY_NAME: dict[str, tuple[Writer, str]] = {
    "deepseek": (named("model.layers.61.enorm.weight", "model.layers.61.eh_proj.weight"), LATENT),
    "glm": (named("model.layers.46.eh_proj.weight", "model.layers.46.mlp.experts.0.up_proj.weight"), LATENT),
    "qwen3-next": (named("mtp.pre_fc_norm_embedding.weight", "mtp.fc.weight"), GATED),
    "gumiho": (named("proj.0.weight", model_type="gumiho"), CELLS),
    "arctic": (named("proj.0.weight", architectures=["ArcticLSTMSpeculatorPreTrainedModel"]), CELLS),
    "peagle-by-its-tensors": (named("mask_hidden", "midlayer.hidden_norm.weight"), f"{P_EAGLE}: {NOT_SERVED}"),
    "dspark-by-its-tensors": (named("fc.weight", "model.markov_head.markov_w1.weight"), f"{DSPARK}: {NOT_SERVED}"),
    "pard": (
        named("model.embed_tokens.weight", architectures=["LlamaForCausalLM"], pard_token=7, spd_type="pard"),
        "a PARD draft, which is a model of its own: name it with --draft",
    ),
    "other-speculators": (
        of_type("jetspec"),
        "a speculators_model_type that is not served: it must be one of eagle, eagle3, mtp, dflash",
    ),
    "fsdp": (named("_fsdp_wrapped_module.midlayer.hidden_norm.weight"), STATE),
    "data-parallel": (named("module.fc.weight"), STATE),
    "compiled": (named("_orig_mod.fc.weight"), STATE),
    "a-model": (
        named("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"),
        "no drafting head of a layout that is known here",
    ),
}


@pytest.mark.parametrize(("write", "what"), BY_NAME.values(), ids=BY_NAME.keys())
def test_layouts_are_refused_by_name(tmp_path: Path, write: Writer, what: str) -> None:
    """With the reason."""
    assert refusal(write(tmp_path / "head")) == f"{{folder}} holds {what}"


def layered(folder: Path) -> Path:
    """EAGLE 3 with a second layer."""
    second = random_tensors(tiny_heads.layer_shapes("layers.1."), 30)
    return change(eagle3_speculators(folder), tensors=dict(second))


def latent(folder: Path) -> Path:
    """EAGLE 3 whose attention is DeepSeek's."""
    kimi = {"layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.ones(2, 2)}
    return change(eagle3_speculators(folder), tensors=dict(kimi))


def with_eagle_config(**keys: object) -> Writer:
    """SpecForge's head with other keys inside eagle_config."""
    return lambda folder: change(specforge(folder), config={"eagle_config": keys})


def with_layer_config(write: Writer, **keys: object) -> Writer:
    """A head of speculators with other sizes."""

    def written(folder: Path) -> Path:
        config = json.loads((write(folder) / "config.json").read_text())
        return change(folder, config={"transformer_layer_config": config["transformer_layer_config"] | keys})

    return written


def with_config(write: Writer, **keys: object) -> Writer:
    """A head with other keys in config.json."""
    return lambda folder: change(write(folder), config=keys)


def with_tensors(write: Writer, **tensors: Tensor | None) -> Writer:
    """A head with other tensors; two underscores are a dot."""
    return lambda folder: change(
        write(folder), tensors={name.replace("__", "."): tensor for name, tensor in tensors.items()}
    )


FILE = "{folder}/model.safetensors: "
CONFIG = '{folder}/config.json: "'
NORM = torch.ones(HIDDEN)
SENTENCES: dict[str, tuple[Writer, str]] = {
    # More than one of what there is one of.
    "second-layer": (
        layered,
        f"{FILE}layers.1.mlp.down_proj.weight belongs to a second layer, but only heads of one are served",
    ),
    "second-module": (
        lambda folder: mimo(folder, modules=2),
        "{folder}/mtp.safetensors: model.mtp_layers.1.final_layernorm.weight belongs to a second module for "
        "multi-token prediction, but only heads of one are served",
    ),
    "second-module-in-config": (
        with_config(mtp_speculators, num_nextn_predict_layers=3),
        f'{CONFIG}num_nextn_predict_layers" is 3, but only heads of one module are served',
    ),
    "latent-attention": (
        latent,
        f"{FILE}layers.0.self_attn.kv_a_proj_with_mqa.weight belongs to latent attention (MLA), which is not served",
    ),
    # Taps.
    "last-boundary": (
        lambda folder: eagle3_speculators(folder, ids=(2, 4, 6)),
        f'{CONFIG}eagle_aux_hidden_state_layer_ids" is [2, 4, 6], but nobody can tell what was read behind layer 6, '
        "the last: before or after the final norm",
    ),
    "last-layer-nested": (
        with_eagle_config(eagle_aux_hidden_state_layer_ids=[1, 2, 5]),
        f'{CONFIG}eagle_config.eagle_aux_hidden_state_layer_ids" is [1, 2, 5], but nobody can tell what was read '
        "behind layer 6, the last: before or after the final norm",
    ),
    "too-deep": (
        lambda folder: eagle3_speculators(folder, ids=(2, 4, 7)),
        f'{CONFIG}eagle_aux_hidden_state_layer_ids" is [2, 4, 7], but the target has 6 layers',
    ),
    "no-list": (
        with_eagle_config(eagle_aux_hidden_state_layer_ids="low"),
        f"{CONFIG}eagle_config.eagle_aux_hidden_state_layer_ids\" is 'low', but must be a list of layers",
    ),
    "negative": (
        with_eagle_config(eagle_aux_hidden_state_layer_ids=[-1, 2, 3]),
        f'{CONFIG}eagle_config.eagle_aux_hidden_state_layer_ids" is [-1, 2, 3], but must be a list of layers',
    ),
    "twice-counted": (
        with_config(specforge, eagle_aux_hidden_state_layer_ids=[1, 3, 5]),
        f'{CONFIG}eagle_aux_hidden_state_layer_ids" stands inside eagle_config too, and counts otherwise there',
    ),
    "other-count": (
        with_eagle_config(eagle_aux_hidden_state_layer_ids=[1, 2]),
        f"{FILE}fc.weight has the shape [48, 144], but config.json and the target ask for [48, 96]",
    ),
    "no-object": (with_config(specforge, eagle_config=7), f'{CONFIG}eagle_config" is 7, but must be an object'),
    # Switches that the tensors deny.
    "fusion-bias": (
        with_config(eagle1_speculators, fusion_bias=True),
        f'{CONFIG}fusion_bias" is true, but the files do not hold what it switches on',
    ),
    "layernorms": (
        with_config(lambda folder: eagle1_speculators(folder, layernorms=True), layernorms=False),
        f'{CONFIG}layernorms" is false, but the files hold what it would switch on',
    ),
    "one-of-three-norms": (
        with_tensors(lambda folder: eagle1_speculators(folder, layernorms=True), embedding_layernorm__weight=None),
        "{folder} lacks the tensor embedding_layernorm.weight",
    ),
    "add-para-norm": (
        with_config(eagle1, add_para_norm=True),
        f'{CONFIG}add_para_norm" is true, but the files do not hold what it switches on',
    ),
    "no-fusion": (
        with_tensors(eagle1_speculators, fusion_fc__weight=None),
        "{folder} lacks the tensor fusion_fc.weight",
    ),
    "half-a-para-norm": (
        with_tensors(lambda folder: eagle1(folder, para_norm=True), embedding_layernorm__weight=None),
        "{folder} lacks the tensor embedding_layernorm.weight",
    ),
    "norm-before-fc": (
        with_config(eagle3_speculators, norm_before_fc=True),
        f'{CONFIG}norm_before_fc" is true, but the files do not hold what it switches on',
    ),
    "fc-norm": (
        with_config(lambda folder: eagle3_speculators(folder, fc_norm=True), fc_norm=False),
        f'{CONFIG}fc_norm" is false, but the files hold what it would switch on',
    ),
    "two-of-three-tap-norms": (
        with_tensors(lambda folder: eagle3_speculators(folder, fc_norm=True), fc_norm__1__weight=None),
        "{folder} lacks the tensor fc_norm.1.weight",
    ),
    "both-norms-before-fc": (
        lambda folder: eagle3_speculators(folder, fc_norm=True, norm_before_fc=True),
        f"{FILE}fc_norm.0.weight is there beside norm_before_fc, which excludes it",
    ),
    "fc-of-no-taps": (
        with_eagle_config(use_aux_hidden_state=False),
        f"{FILE}fc.weight is there, though use_aux_hidden_state is false",
    ),
    "norm-of-none": (
        with_eagle_config(use_last_layernorm=False),
        f"{FILE}norm.weight is there, though use_last_layernorm is false",
    ),
    "unnormed-embedding": (
        with_eagle_config(use_input_layernorm_in_first_layer=False),
        f'{CONFIG}eagle_config.use_input_layernorm_in_first_layer" is false, but the files hold what it would switch '
        "on",
    ),
    "mtp-norm": (
        with_eagle_config(use_mtp_layernorm=True),
        f'{CONFIG}eagle_config.use_mtp_layernorm" is true, but the files do not hold what it switches on',
    ),
    "no-switch": (
        with_config(specforge, norm_output="yes"),
        f"{CONFIG}norm_output\" is 'yes', but must be true or false",
    ),
    "taps-of-a-pair": (
        with_config(lambda folder: modelopt(folder, taps=False, wide=False), eagle_config={}),
        "{folder} lacks the tensor layers.0.hidden_norm.weight",
    ),
    # Vocabulary.
    "other-vocabulary": (with_config(eagle3, vocab_size=91), f'{CONFIG}vocab_size" is 91, but the target has 90'),
    "other-target": (
        with_config(eagle3, target_hidden_size=64),
        f'{CONFIG}target_hidden_size" is 64, but the target has 48',
    ),
    "draft-vocabulary": (
        with_config(eagle3, draft_vocab_size=34),
        f'{CONFIG}draft_vocab_size" is 34, but lm_head.weight has 33 rows',
    ),
    "no-head-for-it": (with_tensors(eagle3, lm_head__weight=None), "{folder} lacks the tensor lm_head.weight"),
    "head-too-tall": (
        with_tensors(eagle3_whole, lm_head__weight=torch.ones(VOCAB + 1, HIDDEN)),
        f"{FILE}lm_head.weight has 91 rows, but the target has 90 ids",
    ),
    "short-map": (
        with_tensors(eagle3, d2t=torch.zeros(5, dtype=torch.int64)),
        f"{FILE}d2t has the shape [5], but must have [33]",
    ),
    "map-of-floats": (
        with_tensors(eagle3, d2t=torch.zeros(DRAFT_VOCAB)),
        f"{FILE}d2t has the type F32, but must have one of I64, I32",
    ),
    "short-marks": (
        with_tensors(eagle3, t2d=torch.ones(DRAFT_VOCAB, dtype=torch.bool)),
        f"{FILE}t2d has the shape [33], but must have [90]",
    ),
    "marks-of-numbers": (
        with_tensors(eagle3, t2d=torch.ones(VOCAB, dtype=torch.int64)),
        f"{FILE}t2d has the type I64, but must have one of BOOL, U8",
    ),
    # Widths.
    "narrow-without-embedding": (
        with_tensors(lambda folder: eagle3(folder, narrow=True), embed_tokens__weight=None),
        "{folder} lacks the tensor embed_tokens.weight",
    ),
    "narrow-without-features": (
        lambda folder: write_head(
            folder,
            FLAT | {"hidden_size": 36},
            random_tensors({"fc.weight": (36, 72), **tiny_heads.layer_shapes("layers.0.", 36)}, 0),
        ),
        f"{CONFIG}hidden_size\" is 36, but the target's is 48, and no tensor leads to the head's",
    ),
    "other-heads": (
        with_config(eagle3, num_attention_heads=2),
        f"{FILE}midlayer.self_attn.o_proj.weight has the shape [48, 64], but config.json and the target ask for "
        "[48, 32]",
    ),
    "own-embedding": (
        with_tensors(eagle1, embed_tokens__weight=torch.ones(VOCAB - 1, HIDDEN)),
        f"{FILE}embed_tokens.weight has the shape [89, 48], but config.json and the target ask for [90, 48]",
    ),
    # Tensors.
    "missing": (
        with_tensors(eagle3, midlayer__mlp__up_proj__weight=None),
        "{folder} lacks the tensor midlayer.mlp.up_proj.weight",
    ),
    "foreign": (with_tensors(eagle3, fc__bias=NORM), f"{FILE}fc.bias is no tensor of this layout"),
    "ours": (with_tensors(eagle3, out_norm__weight=NORM), f"{FILE}out_norm.weight is no tensor of this layout"),
    "twice": (
        with_tensors(eagle3, model__norm__weight=NORM),
        f"{FILE}norm.weight is the same tensor as model.norm.weight",
    ),
    "misshapen": (
        with_tensors(eagle3, norm__weight=torch.ones(7)),
        f"{FILE}norm.weight has the shape [7], but config.json and the target ask for [48]",
    ),
    "integers": (
        with_tensors(eagle3, norm__weight=torch.ones(HIDDEN, dtype=torch.int32)),
        f"{FILE}norm.weight has the type I32, but must have one of BF16, F16, F32",
    ),
    "vector-for-a-matrix": (
        with_config(with_tensors(eagle3, midlayer__self_attn__k_proj__weight=NORM), num_key_value_heads=None),
        f"{FILE}midlayer.self_attn.k_proj.weight has the shape [48], but must have 2 dimensions",
    ),
    "one-bias-of-three": (
        with_tensors(eagle1, layers__0__self_attn__q_proj__bias=torch.ones(64)),
        "{folder} lacks the tensor layers.0.self_attn.k_proj.bias",
    ),
    "one-head-norm": (
        with_tensors(eagle3, midlayer__self_attn__q_norm__weight=torch.ones(16)),
        "{folder} lacks the tensor midlayer.self_attn.k_norm.weight",
    ),
    "no-mtp-norm": (
        with_tensors(mtp_speculators, mtp_layers__0__final_layernorm__weight=None),
        "{folder} lacks the tensor mtp_layers.0.final_layernorm.weight",
    ),
    # Keys.
    "no-heads": (with_config(eagle3, num_attention_heads=None), f'{CONFIG}num_attention_heads" is missing'),
    "wrong-type": (
        with_config(eagle3, hidden_size="wide"),
        f"{CONFIG}hidden_size\" is 'wide', but must be an integer of at least 1",
    ),
    "groups": (
        with_config(eagle3, num_key_value_heads=3),
        f'{CONFIG}num_key_value_heads" is 3, which does not divide 4',
    ),
    "odd-heads": (
        with_config(eagle3, head_dim=15),
        f'{CONFIG}head_dim" is 15, but rotary embeddings need an even number',
    ),
    "activation": (with_config(eagle3, hidden_act="gelu"), f'{CONFIG}hidden_act" is \'gelu\', but must be "silu"'),
    "window": (
        with_config(eagle3, use_sliding_window=True),
        f'{CONFIG}use_sliding_window" is true, but heads with windows are not served',
    ),
    "quantized": (
        with_config(eagle3, quantization_config={"bits": 4}),
        f'{CONFIG}quantization_config" is set, but only unquantized weights are served',
    ),
    "rope": (
        with_config(eagle3, rope_scaling={"rope_type": "longrope"}),
        f"{CONFIG}rope_scaling.rope_type\" is 'longrope', but must be one of default, linear, dynamic, llama3, yarn",
    ),
    "other-layer": (
        lambda folder: mtp_speculators(folder, kind="qwen3_next"),
        f"{CONFIG}transformer_layer_config.model_type\" is 'qwen3_next', whose layers a head does not have here: it "
        "must be one of llama, qwen2, qwen3, mimo",
    ),
    "nested-wrong-type": (
        with_layer_config(eagle3_speculators, rms_norm_eps="small"),
        f"{CONFIG}transformer_layer_config.rms_norm_eps\" is 'small', but must be a positive number",
    ),
}


@pytest.mark.parametrize(("write", "sentence"), SENTENCES.values(), ids=SENTENCES.keys())
def test_what_does_not_fit_is_one_sentence(tmp_path: Path, write: Writer, sentence: str) -> None:
    """It names the file, the tensor or key, and the limit."""
    assert refusal(write(tmp_path / "head")) == sentence


OFFSETS = (
    "{folder}/model.safetensors: d2t does not lead to rising ids below 90: it must hold offsets, so that i means "
    "i + d2t[i]"
)
GOOD = tiny_heads.vocabulary_map()
IDS = GOOD["d2t"] + torch.arange(DRAFT_VOCAB)


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        # Ids where offsets belong: 2i + 3 + i runs out of the vocabulary.
        (with_tensors(eagle3, d2t=IDS), OFFSETS),
        (with_tensors(eagle3, d2t=-torch.arange(DRAFT_VOCAB)), OFFSETS),
        (with_tensors(eagle3, d2t=GOOD["d2t"] - 4), OFFSETS),
        (with_tensors(eagle3_whole, d2t=torch.ones(VOCAB, dtype=torch.int64)), OFFSETS),
        (
            with_tensors(eagle3, d2t=torch.zeros(DRAFT_VOCAB, dtype=torch.int64)),
            "{folder}/model.safetensors: t2d marks other ids than the 33 of the head",
        ),
        (
            with_tensors(eagle3, t2d=GOOD["t2d"].index_fill(0, torch.tensor([0]), 1)),
            "{folder}/model.safetensors: t2d marks other ids than the 33 of the head",
        ),
    ],
    ids=["absolute", "falling", "below-zero", "past-the-end", "zeros", "one-id-more"],
)
def test_a_map_must_fit_its_marks(tmp_path: Path, write: Writer, sentence: str) -> None:
    """Values are looked at when the head is loaded, before anything large."""
    folder, target = write(tmp_path / "head"), tiny_target()
    found = read_head(folder, target)
    with pytest.raises(ModelRefused) as caught:
        found.load(target, CPU, torch.float32, ReferenceOps())
    assert caught.value.message.replace(str(folder), "{folder}") == sentence


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_pickled_heads_name_the_converter(tmp_path: Path, name: str) -> None:
    """They are never loaded here."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"")
    advice = "`outrider convert-head {folder} OUT` writes what is in it as safetensors"
    assert refusal(tmp_path) == f"{{folder}}/{name} is pickled, which can run code: {advice}"


def test_folders_without_weights(tmp_path: Path) -> None:
    """Nothing to load, no such folder, and no config.json."""
    assert refusal(tmp_path) == "{folder}/config.json cannot be read: No such file or directory"
    (tmp_path / "config.json").write_text("{}")
    assert refusal(tmp_path) == "{folder} has no safetensors files"


def test_several_files_need_an_index(tmp_path: Path) -> None:
    """One file may have any name; of several an index must say which belong together."""
    folder = eagle3(tmp_path / "head")
    (folder / "model.safetensors").rename(folder / "head.safetensors")
    assert read_head(folder, tiny_target()).method == "eagle3"
    save_file({"more": torch.ones(1)}, folder / "more.safetensors")
    assert refusal(folder) == "{folder} has no model.safetensors; what it has is head.safetensors, more.safetensors"


@pytest.mark.parametrize("theta", [0.0, -1.0, float("inf"), float("nan")])
def test_theta_must_be_a_positive_number(tmp_path: Path, theta: float) -> None:
    """As in config.json."""
    assert refusal(eagle3(tmp_path / "head"), theta) == f"theta is {theta:g}, but must be a positive number"


def test_one_layer_targets_have_no_inner_boundary(tmp_path: Path) -> None:
    """So a head that does not say what it reads cannot read anything of them."""
    folder = eagle3(tmp_path / "head")
    with pytest.raises(ModelRefused) as caught:
        read_head(folder, tiny_target(num_layers=1))
    words = '"eagle_aux_hidden_state_layer_ids" is missing, and a target of one layer has no boundary inside'
    assert caught.value.message == f"{folder}/config.json: {words}"


def test_theta_needs_a_layout_with_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would change nothing."""
    monkeypatch.setattr(checkpoint, "LAYOUTS", (checkpoint.Layout(lambda _, __: True, read_eagle1),))
    words = "(eagle1) has no rotary embedding, so theta must be left out"
    assert refusal(eagle1(tmp_path / "head"), 5.0) == f"{{folder}} {words}"


@pytest.mark.parametrize("write", [eagle1, eagle3, specforge])
def test_numbers_that_are_none_are_found_when_a_head_is_loaded(tmp_path: Path, write: Writer) -> None:
    """The file and its tensor are named; reading what a head is looks at no numbers."""
    folder = write(tmp_path / "head")
    name, tensor = max(load_file(folder / "model.safetensors").items(), key=lambda item: item[1].numel())
    tensor.view(-1)[7] = torch.nan
    change(folder, tensors={name: tensor})
    head = read_head(folder, tiny_target())
    with pytest.raises(ModelRefused, match=rf"model\.safetensors: {re.escape(name)} holds NaN or infinity as float32"):
        head.load(tiny_target(), CPU, torch.float32, ReferenceOps())
