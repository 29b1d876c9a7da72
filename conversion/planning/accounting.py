"""The promise of a plan, held: every key of the file used once or ignored, every parameter filled once."""

from collections import Counter
from collections.abc import Mapping

from hf_vit.conversion.planning.layout import listing, refuse
from hf_vit.conversion.planning.plan import Plan
from hf_vit.conversion.readers.checkpoint import Shape
from hf_vit.conversion.sizes import size_text


def check_accounting(plan: Plan, shapes: Mapping[str, Shape], parameters: Mapping[str, Shape]) -> None:
    """Hold the promise: every key used once or ignored, every parameter filled once and with its shape.

    Args:
        plan: to be checked.
        shapes: key -> shape, of the file.
        parameters: name in the bare model, or of its classifier -> shape.

    Raises:
        UserError: it does not hold; what is wrong is listed.
    """
    used = Counter([*plan.consumed, *plan.ignored])
    moved = (row for row in plan.rows if not row.beside)  # what is computed from several may take part in more
    uses = Counter((row.key, row.block, row.piece) for row in moved if row.key is not None)
    twice = {key for key, count in used.items() if count > 1} | {key for (key, *_), count in uses.items() if count > 1}
    blocks = Counter(key for key, block, _ in uses if block is not None)
    pieces = Counter((key, piece[1]) for key, _, piece in uses if piece is not None)
    filled = Counter(row.parameter for row in plan.rows)
    misshapen = [
        f"{row.parameter} {size_text(row.parameter_shape)} (needs {size_text(parameters[row.parameter])})"
        for row in plan.rows
        if row.parameter in parameters and row.parameter_shape != parameters[row.parameter]
    ]
    refuse(
        listing("keys left over", [key for key in shapes if not used[key]]),
        listing("keys used twice", sorted(twice)),
        listing("keys used in part", [key for key, count in blocks.items() if count != shapes.get(key, (0,))[0]]),
        listing("keys used in part", [key for (key, needed), count in pieces.items() if count != needed]),
        listing("keys used that are not there", [key for key in used if key not in shapes]),
        listing("parameters not filled", [name for name in parameters if not filled[name]]),
        listing("parameters filled twice", [name for name, count in filled.items() if count > 1]),
        listing("parameters that the model does not have", [name for name in filled if name not in parameters]),
        listing("parameters of another shape", misshapen),
    )
