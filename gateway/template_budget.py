"""What a template may take and write, counted while it runs. Knows no environment, and changes nothing that it counts.

A template is rewritten before it is compiled: a filter goes around whatever a loop takes, and around every piece of
text, also where that goes into a block or a macro and not into the prompt. What one call of one method builds is not
counted; none of them is given a size that comes from a request.
"""

from collections.abc import Iterable, Iterator

from jinja2 import TemplateError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import MAX_RANGE
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000  # items that all loops of a rendering take
MAX_TEXT_LEN = 16 << 20  # characters that a rendering puts together, each counted wherever it passes
MAX_POWER_BITS = 1024
# No template can name it, because of the spaces.
BUDGET = "budget of a rendering"


class BudgetSpent(TemplateError):
    """A rendering takes more than it may."""


class Budget:
    """What is left to one rendering."""

    def __init__(self, steps: int = MAX_STEPS, text_len: int = MAX_TEXT_LEN) -> None:
        self._steps = steps
        self._text_len = text_len

    def step(self, count: int = 1) -> None:
        """Pays for items of a loop; raises BudgetSpent."""
        self._steps -= count
        if self._steps < 0:
            raise BudgetSpent("it takes too many steps")

    def write(self, text_len: int) -> None:
        """Pays for characters; raises BudgetSpent."""
        self._text_len -= text_len
        if self._text_len < 0:
            raise BudgetSpent("it becomes too long")


class Metered(NodeTransformer):
    """Rewrites a template that has been parsed."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - the names that the base class looks for
        """Counts the items of a loop."""
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "metered_loop")
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        """Counts what is written."""
        self.generic_visit(node)
        node.nodes = [_filtered(child, "metered_text") for child in node.nodes]
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        """Makes an expression of plain text, since only expressions have filters."""
        return nodes.Const(node.data, lineno=node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """Counts what the operator ~ makes, which the sandbox does not let one intercept."""
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "metered_join")


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def pay(context: Context, operator: str, left: object, right: object) -> None:
    """Pays for what an operator makes, before it does; raises BudgetSpent."""
    sizes = [len(value) for value in (left, right) if isinstance(value, str | list | tuple)]
    if operator == "+":
        _budget(context).write(sum(sizes))
    elif operator == "*" and sizes:
        counts = [value for value in (left, right) if isinstance(value, int)]
        _budget(context).write(sizes[0] * max(0, *counts, 0))
    elif operator == "**" and _power_bits(left, right) > MAX_POWER_BITS:
        raise BudgetSpent("a number becomes too large")


def _power_bits(base: object, exponent: object) -> int:
    return base.bit_length() * exponent if isinstance(base, int) and isinstance(exponent, int) else 0


def _budget(context: Context) -> Budget:
    budget = context.parent[BUDGET]
    assert isinstance(budget, Budget)
    return budget


@pass_context
def _loop(context: Context, items: Iterable[object]) -> Iterator[object]:
    budget = _budget(context)
    for item in items:
        budget.step()
        yield item


@pass_context
def _text(context: Context, value: object) -> str:
    text = str(value)
    _budget(context).write(len(text))
    return text


@pass_context
def _join(context: Context, values: list[object]) -> str:
    texts = [str(value) for value in values]
    _budget(context).write(sum(map(len, texts)))
    return "".join(texts)


@pass_context
def counted_range(context: Context, *bounds: int) -> range:
    """A range, paid for at once: a filter may go through it without a loop."""
    found = range(*bounds)
    if len(found) > MAX_RANGE:
        raise BudgetSpent(f"it counts to more than {MAX_RANGE}")
    _budget(context).step(len(found))
    return found


FILTERS = {"metered_loop": _loop, "metered_text": _text, "metered_join": _join}
