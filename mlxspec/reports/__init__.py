"""Reports as HTML pages that need nothing but themselves."""

from .bars import Bar, BarChart, BarGroup
from .page import check_report, render, write_report
from .tree_drawing import TreeDrawing, TreeNode

__all__ = [
    "Bar",
    "BarChart",
    "BarGroup",
    "TreeDrawing",
    "TreeNode",
    "check_report",
    "render",
    "write_report",
]
