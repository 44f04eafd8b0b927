"""`python -m mailroom` is `mailroom`."""

from mailroom.cli import main

if __name__ == "__main__":
    main()
