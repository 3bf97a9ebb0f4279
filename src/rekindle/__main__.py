"""`python -m rekindle`: the command `rekindle`."""

from rekindle.cli import main

if __name__ == "__main__":
    main()
