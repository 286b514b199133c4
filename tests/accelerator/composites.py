"""Operators that torch composes of others, and composes differently on devices that are not the CPU."""

from __future__ import annotations


def register() -> None:
    pass
