"""Reports as HTML pages that need nothing but themselves."""

from .bars import Bar, BarChart, BarGroup
from .page import check_writable, render, write_page

__all__ = ["Bar", "BarChart", "BarGroup", "check_writable", "render", "write_page"]
