"""Where tasks run: local and remote Dask clusters, their checks, and the machine underneath.

The only floor that imports ``distributed``, and only inside its modules: importing this package loads nothing.
"""
