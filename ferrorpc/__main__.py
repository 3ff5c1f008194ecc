"""The `ferrorpc` program; `python -m ferrorpc` where the script is not on the PATH."""

import signal


def main() -> None:
    """Runs the command line. An interrupt while its modules are imported ends the process, without a traceback of imports."""
    by_python = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if by_python:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ferrorpc.cli.main import main as run_command

    if by_python:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run_command()


if __name__ == "__main__":
    main()
