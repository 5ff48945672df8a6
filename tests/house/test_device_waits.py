"""Where the engine reads numbers that may lie on a device, and so waits for it: here alone, each with its reason."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ENGINE = Path(__file__).resolve().parents[2] / "outrider" / "engine"
METHODS = {"cpu", "tolist", "item", "nonzero"}
CASTS = {"bool", "int", "float"}
# What makes a number of a tensor, which a cast then reads.
REDUCTIONS = {"any", "all", "isfinite", "isnan", "amax", "amin", "max", "min", "sum", "argmax", "argmin"}

LOADING = "once, while a model is loaded"
ON_HOST = "of arrays and tensors that are the host's whatever the device"
ON_CPU = "on the CPU alone, where nothing is waited for"
# Reads in each function. A new one belongs here only if the host cannot go on without the number.
READS: dict[str, tuple[int, str]] = {
    "heads/chain_layouts.py:_token_ids": (3, LOADING),
    "heads/chain_layouts.py:read_hydra": (1, "of a setting in a file"),
    "heads/feature_checkpoint.py:FeatureCheckpoint.load": (5, LOADING),
    "heads/layouts.py:one_layer": (1, "of a name's parts"),
    "models/fused.py:FusedTransformer.chain": (1, ON_CPU),
    "models/graphed.py:GraphedTransformer.chain": (1, "the tokens of several steps, after the last of them"),
    "models/gguf.py:_numbers": (1, LOADING),
    "models/gguf.py:_gguf_shape": (1, "of a name's parts"),
    "models/experts.py:ExpertRooms.take": (1, "of a name's parts"),
    "ops/experts.py:routed": (2, "which experts have rows, and which rows: a product for each, of as many"),
    "models/mxfp4.py:matrix_of": (1, LOADING),
    "models/weights.py:check_numbers": (1, LOADING),
    "models/transformer.py:Transformer.__init__": (1, LOADING),
    "batching.py:shared_work": (1, ON_HOST),
    "batching.py:_items": (1, ON_HOST),
    "batching.py:_Rows.add_trees": (4, ON_HOST),
    "batching.py:_plan": (1, ON_HOST),
    "batching.py:_shared_plan": (1, ON_HOST),
    "models/simulated.py:SimulatedDecoder.forward": (1, ON_HOST),
    "ops/native.py:NativeOps.softmax": (1, ON_CPU),
    "ops/native.py:NativeOps.rank": (1, ON_CPU),
    "ops/reference.py:_rows_of": (1, ON_CPU),
    "ops/eager.py:_check_scores": (1, ON_CPU),
    "sampling/transforms.py:_keep_first": (1, ON_CPU),
    "sampling/draw.py:_ids": (1, ON_HOST),
    "sampling/draft_distribution.py:DraftDistributions.draw": (2, ON_HOST),
    "sampling/draft_distribution.py:DraftDistributions.sizes": (1, ON_HOST),
    "sampling/draft_distribution.py:DraftDistributions.probs": (1, ON_HOST),
    "sampling/draft_distribution.py:DraftDistributions.distributions": (2, ON_HOST),
    "sampling/draw.py:are_numbers": (1, "of a row that nothing could be drawn from, to say why"),
    "ops/faults.py:read_ids": (1, "the tokens of a step, which the host is there to commit; the one wait of a draw"),
    "ops/faults.py:check_probs": (1, "rules that compare probabilities must not compare NaN"),
    "sampling/transforms.py:_cut_top_p": (
        1,
        "whether the first guess of a nucleus' size is enough; a whole sort costs more",
    ),
    "sampling/draw.py:draw_from": (2, "the tokens of rules with distributions, and keys, which are the host's"),
    "ops/blocks.py:_quantise": (1, LOADING),
    "sampling/draft_distribution.py:quantise": (1, "a distribution that is sent"),
    "sampling/draft_distribution.py:_top": (5, "the tokens of a distribution that is sent, and those that tie"),
    "sampling/logprobs.py:row_logprobs": (3, "log-probabilities that were asked for"),
    "sampling/logprobs.py:_top_ids": (1, "alternatives that tie, beside log-probabilities that were asked for"),
    "sampling/beams.py:select": (3, "the candidates of a beam search, which the host sorts out"),
    "heads/decoder.py:HeadDecoder._depths": (1, "heads that have weights of their own for each depth"),
}


def is_of_tensor(argument: ast.AST) -> bool:
    """Whether an expression may be a number of a tensor."""
    return any(
        isinstance(node, ast.Subscript)
        or (isinstance(node, ast.Attribute) and node.attr in REDUCTIONS)
        or (isinstance(node, ast.Name) and node.id == "torch")
        for node in ast.walk(argument)
    )


def reads(source: str) -> Iterator[str]:
    """The function that each call stands in which may read a tensor's numbers."""
    stack: list[tuple[ast.AST, str]] = [(ast.parse(source), "")]
    while stack:
        node, name = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{name}.{node.name}".lstrip(".")
        if isinstance(node, ast.Call):
            function = node.func
            is_method = isinstance(function, ast.Attribute) and function.attr in METHODS
            is_cast = isinstance(function, ast.Name) and function.id in CASTS and any(map(is_of_tensor, node.args))
            if is_method or is_cast:
                yield name
        stack += [(child, name) for child in ast.iter_child_nodes(node)]


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("x.cpu()", 1),
        ("x.tolist()", 1),
        ("x[0].item()", 1),
        ("bool(torch.isfinite(x).all())", 1),
        ("bool((x > 0).any())", 1),
        ("int(x[3])", 1),
        ("float(x.sum())", 1),
        ("x.nonzero().flatten().tolist()", 2),
        ("bool(names) and int('3')", 0),
        ("send(x, device)", 0),
    ],
)
def test_a_read_is_found(source: str, count: int) -> None:
    """By its method, or by the cast of what a reduction leaves."""
    assert len(list(reads(f"def f():\n    {source}"))) == count


def test_the_engine_waits_for_a_device_where_it_has_to_alone() -> None:
    """Each read has its place and its reason in the list, and nothing in the list has gone."""
    found = Counter(
        f"{path.relative_to(ENGINE).as_posix()}:{name}"
        for path in ENGINE.rglob("*.py")
        for name in reads(path.read_text(encoding="utf-8"))
    )
    assert found == {place: count for place, (count, _) in READS.items()}
