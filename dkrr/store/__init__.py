"""Where things are kept: files and objects by key, checksummed chunks, documents under a condition, and leases."""
