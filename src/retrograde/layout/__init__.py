"""Pure arithmetic: which parameters form a unit, where each lies in the flat buffer and the shards, on whom."""

from retrograde.layout.boxes import Box, slot_boxes, view_box
from retrograde.layout.flat import Layout, Slot, is_dense, row_by_row, strides_of
from retrograde.layout.grid import Grid
from retrograde.layout.offload import Offload
from retrograde.layout.owners import Loads
from retrograde.layout.policy import Policy, check_reduce, check_stage, parse_bytes
from retrograde.layout.precision import Dtypes, Precision
from retrograde.layout.units import Units, UnitSpec, check_units, find_units
from retrograde.layout.whole import Whole, whole_names

__all__ = [
    "Box",
    "Dtypes",
    "Grid",
    "Layout",
    "Loads",
    "Offload",
    "Policy",
    "Precision",
    "Slot",
    "UnitSpec",
    "Units",
    "Whole",
    "check_reduce",
    "check_stage",
    "check_units",
    "find_units",
    "is_dense",
    "parse_bytes",
    "row_by_row",
    "slot_boxes",
    "strides_of",
    "view_box",
    "whole_names",
]
