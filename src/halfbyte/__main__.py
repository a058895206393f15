"""``python -m halfbyte``."""

from halfbyte.cli import main

if __name__ == "__main__":
    main()
