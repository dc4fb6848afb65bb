"""Python imports this when a process starts: those that tests start have the faults that their environment names."""

import os

if os.environ.get("DKRR_FAILPOINTS"):
    import failpoints

    failpoints.arm(os.environ["DKRR_FAILPOINTS"], os.environ.get("DKRR_FAILPOINTS_ONCE"))
