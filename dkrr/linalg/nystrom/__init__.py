"""Nystrom regression over m centres: an approximation, in passes over the rows."""
