"""`python -m ferrorpc`: the command line, for when the script `ferrorpc` is not on the PATH."""

from ferrorpc.cli.main import main

if __name__ == "__main__":
    main()
