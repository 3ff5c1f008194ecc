"""Log lines say whose they are, in text and in JSON."""

import io
import json
import logging
import sys
import threading

import pytest

from ferrorpc import logs
from ferrorpc.config import Config
from ferrorpc.logs import JsonFormatter, TextFormatter, set_log_origin


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    monkeypatch.setattr(logs, "_origin", {})


def record(**extra):
    return logging.getLogger("ferrorpc.test").makeRecord(
        "ferrorpc.test", logging.WARNING, "file", 1, "%s was late", ("rank 2",), None, extra=extra
    )


def test_a_line_before_the_job_is_joined_names_none():
    entry = json.loads(JsonFormatter().format(record()))
    assert {name: entry[name] for name in entry if name != "time"} == {
        "level": "WARNING",
        "logger": "ferrorpc.test",
        "message": "rank 2 was late",
    }
    assert TextFormatter().format(record()).endswith("WARNING ferrorpc.test: rank 2 was late")


def test_a_members_lines_name_its_job_rank_and_generation():
    set_log_origin("digits", 0, 3)
    entry = json.loads(JsonFormatter().format(record()))
    assert (entry["job"], entry["rank"], entry["generation"]) == ("digits", 0, 3)
    assert TextFormatter().format(record()).endswith("WARNING ferrorpc.test [job=digits rank=0 generation=3]: rank 2 was late")


def test_a_line_about_another_job_names_that_one_alone():
    set_log_origin("digits", 0, 3)
    entry = json.loads(JsonFormatter().format(record(job="other", rank=None, generation=7)))
    assert {name: entry[name] for name in ("job", "rank", "generation") if name in entry} == {"job": "other", "generation": 7}


def test_what_others_say_of_themselves_can_neither_begin_a_line_nor_command_a_terminal():
    told = logging.getLogger("ferrorpc.test").makeRecord(
        "ferrorpc.test", logging.WARNING, "file", 1, "it is %s", ("\x1b[2Jgone\r\n2026-01-01 CRITICAL all is lost\x07",), None
    )
    first, *others = TextFormatter().format(told).split("\n")
    assert first.endswith("WARNING ferrorpc.test: it is \\x1b[2Jgone\\r")
    assert others == ["    2026-01-01 CRITICAL all is lost\\x07"]


def test_a_later_init_waits_for_no_lock_of_logging(monkeypatch):
    new_logger(monkeypatch)
    logs.set_up_logging(Config(environment={}))
    later = threading.Thread(target=logs.set_up_logging, args=(Config(environment={}),), daemon=True)
    with logging._lock:
        later.start()
        later.join(10.0)
        assert not later.is_alive()


def new_logger(monkeypatch):
    """The library's, where nobody has set up logging."""
    logger = logging.getLogger("ferrorpc")
    for each in (logging.getLogger(), logger):
        monkeypatch.setattr(each, "handlers", [])
    monkeypatch.setattr(logger, "level", logger.level)
    return logger


def test_lines_go_to_what_is_standard_error_at_the_time(monkeypatch):
    logger = new_logger(monkeypatch)
    logs.set_up_logging(Config(environment={}))
    for name in ("first", "second"):
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        logger.warning(name)
        assert sys.stderr.getvalue().endswith(f"WARNING ferrorpc: {name}\n")


def test_the_format_is_that_of_the_latest_set_up(monkeypatch, capsys):
    logger = new_logger(monkeypatch)
    for log_format in ("text", "json", "text"):
        logs.set_up_logging(Config({"log_format": log_format}, environment={}))
        logger.warning("late")
    first, second, third = capsys.readouterr().err.splitlines()
    assert json.loads(second)["message"] == "late"
    for line in (first, third):
        assert line.endswith("WARNING ferrorpc: late")


def test_a_program_that_sets_up_logging_later_sees_no_line_twice(monkeypatch, capsys):
    logger = new_logger(monkeypatch)
    logs.set_up_logging(Config(environment={}))
    logger.warning("before")
    logging.basicConfig(format="mine: %(message)s")
    logger.warning("after")
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("WARNING ferrorpc: before")
    assert second == "mine: after"


def test_a_level_that_the_program_has_set_stays_unless_the_setting_is_given(monkeypatch):
    logger = logging.getLogger("ferrorpc")
    monkeypatch.setattr(logs, "_level", logging.NOTSET)
    monkeypatch.setattr(logger, "handlers", [logging.NullHandler()])
    levels = []
    for level, arguments in ((logging.ERROR, {}), (logging.ERROR, {"log_level": "DEBUG"}), (None, {})):
        if level is not None:
            monkeypatch.setattr(logger, "level", level)
        logs.set_up_logging(Config(arguments, environment={}))
        levels.append(logging.getLevelName(logger.level))
    assert levels == ["ERROR", "DEBUG", "WARNING"]  # the last is the default, as after an earlier call of its own


class Handler(logging.Handler):
    """A program's own, which does anything with a record, such as raise."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def emit(self, record):
        self.act(record)


@pytest.fixture
def told():
    log = logging.getLogger("ferrorpc.test.tell")
    log.propagate = False
    yield log
    log.handlers.clear()


def test_a_handler_that_raises_is_shown_and_disturbs_nothing(told, capsys):
    told.addHandler(Handler(lambda record: {}[record.getMessage()]))
    logs.tell(told, logging.WARNING, "%s was late", "rank 2")
    assert "KeyError: 'rank 2 was late'" in capsys.readouterr().err


def test_what_a_handler_does_tells_nothing_in_turn(told):
    seen = []

    def write(record):
        seen.append((record.getMessage(), record.filename))
        logs.tell(told, logging.WARNING, "%s waits for the store", "the handler")

    told.addHandler(Handler(write))
    for _ in range(2):
        logs.tell(told, logging.WARNING, "%s was late", "rank 2")
    assert seen == [("rank 2 was late", "test_logs.py")] * 2
