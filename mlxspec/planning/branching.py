"""Chain or tree: whether branches can pay at all under a cost curve."""

from __future__ import annotations

from .cost_curve import CostCurve

_ROWS_OF_A_TREE = 16
_FLAT = 2.0


def trees_pay(curve: CostCurve) -> bool:
    """Whether rows are cheap enough for drafts that branch.

    Only where sixteen rows cost less than two plain steps do branches pay for themselves;
    elsewhere a chain is as fast and spares the work of growing a tree.
    """
    rows = min(_ROWS_OF_A_TREE, curve.widest)
    return rows > 1 and curve(rows) < _FLAT
