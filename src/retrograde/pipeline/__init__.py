"""Pipelines: schedules as data, and what runs them."""

from retrograde.pipeline.schedule import Action, Kind, Schedule

__all__ = ["Action", "Kind", "Schedule"]
