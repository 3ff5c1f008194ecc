"""`python -m ferrorpc`: the command line, where its script is not on the PATH."""

from ferrorpc.cli.main import main

if __name__ == "__main__":
    main()
