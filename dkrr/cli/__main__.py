"""``python -m dkrr.cli``, where the command itself is not on the path."""

from dkrr.cli import main

if __name__ == "__main__":
    main(prog_name="dkrr")
