"""Figures of speed, memory and accuracy, each measured in one run against its bar or its rivals."""
