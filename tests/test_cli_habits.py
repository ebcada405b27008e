"""The habits of every verb, checked on the command itself: what is added later is held to them without a line here.

Commands are found by walking typer's tree. All of it happens in three processes: one asks each verb for help, one gives each
verb something wrong, and one completes a line as a shell would.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import typer

from thermocline.cli import app

# Verbs that answer within two seconds whatever they are given. Everything else shows a bar.
AT_ONCE = {
    "doctor", "estimate", "heat merge", "heat show", "heat diff", "plan show", "plan check",
}  # fmt: skip

# Verbs that serve until they are stopped: they have no result, and log JSON lines instead.
UNTIL_STOPPED = {"serve run"}

# What every verb takes, and how it is written.
SHARED = {"json": ["--json"], "quiet": ["--quiet", "-q"], "debug": ["--debug"]}

# What verbs write.
OUTPUTS = {"json", "output", "report", "html", "run", "checkpoint", "logdir", "target"}


def walk(command, name=""):
    """(name, command) of a command and of all below it; the name of the root is empty."""
    yield name, command
    for below, child in getattr(command, "commands", {}).items():
        yield from walk(child, f"{name} {below}".strip())


ALL = dict(walk(typer.main.get_command(app)))
VERBS = {name: command for name, command in ALL.items() if not hasattr(command, "commands")}

WALK = """
import contextlib, io, json, sys
import typer
from thermocline.cli import app, main

def walk(command, name=()):
    yield name, command
    for below, child in getattr(command, "commands", {}).items():
        yield from walk(child, (*name, below))

def run(arguments):
    sys.argv = ["thermocline", *arguments]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as left:
            code = left.code or 0
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}

answers = {}
for name, command in walk(typer.main.get_command(app)):
    for arguments in ASK(command):
        answers[" ".join([*name, *arguments[:1]])] = run([*name, *arguments])
print(json.dumps({"answers": answers, "torch": "torch" in sys.modules}))
"""

ASK_HELP = "ASK = lambda command: [['--help']]"

# Required arguments and options, all of them naming files in a folder that is not there.
ASK_MISSING = """
def ASK(command):
    needed = [one for one in command.params if one.required]
    if hasattr(command, "commands") or not needed:
        return []
    file = "no/such/folder/file.json"
    options = [word for one in needed if one.param_type_name == "option" for word in (one.opts[0], file)]
    return [[*options, *[file for one in needed if one.param_type_name == "argument"]]]
"""

ASK_UNKNOWN = "ASK = lambda command: [['--no-such-option']]"


def python(code, **environment):
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "120", **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ask(what):
    return json.loads(python(what + WALK))


@pytest.fixture(scope="module")
def helped():
    return ask(ASK_HELP)


def test_asking_any_verb_for_help_does_not_load_torch(helped):
    assert helped["torch"] is False
    assert len(helped["answers"]) == len(ALL) >= 30
    assert {answer["code"] for answer in helped["answers"].values()} == {0}
    assert {answer["err"] for answer in helped["answers"].values()} == {""}


@pytest.mark.parametrize("name", ALL)
def test_help_says_what_it_does_and_ends_with_an_example(name, helped):
    command = ALL[name]
    text = helped["answers"][f"{name} --help".strip()]["out"]
    assert re.search(rf"Example:\s+thermocline {name}", text)
    first = (command.help or "").strip().split("\n")[0]
    assert first and first[0].isupper() and "." in (command.help or "")


@pytest.mark.parametrize("name", ALL)
def test_the_example_is_a_line_the_command_line_understands(name):
    example = (ALL[name].epilog or "").split("Example:")[1].split("   (")[0]
    words = shlex.split(example)
    assert words[0] == "thermocline"
    command, context = ALL[""], None
    words = words[1:]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    context = command.make_context("thermocline", list(words), resilient_parsing=True)
    assert not context.args
    given, _, _ = command.make_parser(context).parse_args(list(words))
    missing = [one.name for one in command.params if one.required and given.get(one.name) is None]
    assert not missing, f"the example leaves out {missing}"


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_takes_json_quiet_and_debug_written_the_same_way(name):
    options = {one.name: one for one in VERBS[name].params}
    for shared, spelt in SHARED.items():
        if shared == "json" and name in UNTIL_STOPPED:
            continue
        assert shared in options, f"{name} lacks --{shared}"
        assert options[shared].opts == spelt
    if "json" in options:
        assert options["json"].metavar == "FILE"
        assert options["json"].default is None


@pytest.mark.parametrize("name", VERBS)
def test_every_option_says_what_it_is_for_in_a_sentence(name):
    for one in VERBS[name].params:
        help = getattr(one, "help", None)
        assert help, f"{name}: {one.name} has no help"
        assert help[0].isupper() and help.rstrip()[-1] in ".)]", f"{name}: {one.name}: {help!r}"


@pytest.mark.parametrize("name", VERBS)
def test_every_output_is_checked_before_the_work(name):
    outputs = [one for one in VERBS[name].params if one.name in OUTPUTS and (name, one.name) != ("plan check", "run")]
    assert all(one.callback is not None for one in outputs), [one.name for one in outputs if one.callback is None]


def test_no_flag_is_followed_by_its_type(helped):
    assert not [name for name, answer in helped["answers"].items() if "<bool>" in answer["out"]]


def source_of(function, seen):
    """The source of a function and of all functions of the command line that it calls; those of `output` show the bars."""
    if function in seen or function.__module__ == "thermocline.cli.output":
        return ""
    seen.add(function)
    source = inspect.getsource(function)
    called = (vars(inspect.getmodule(function)).get(name) for name in re.findall(r"\b(\w+)\(", source))
    ours = (one for one in called if inspect.isfunction(one) and one.__module__.startswith("thermocline.cli."))
    return source + "".join(source_of(one, seen) for one in ours)


@pytest.mark.parametrize("name", sorted(set(VERBS) - AT_ONCE - UNTIL_STOPPED))
def test_what_may_take_longer_than_two_seconds_shows_progress(name):
    assert re.search(r"(progress_bar|at_work)\((\w+\.)?quiet", source_of(inspect.unwrap(VERBS[name].callback), set()))


def test_the_verbs_said_to_answer_at_once_exist():
    assert set(VERBS) >= AT_ONCE | UNTIL_STOPPED


def test_files_that_are_not_there_are_bad_input_in_one_paragraph():
    answers = ask(ASK_MISSING)["answers"]
    assert len(answers) >= 8
    for name, answer in answers.items():
        assert answer["code"] == 2, (name, answer)
        assert "Traceback" not in answer["err"] and answer["out"] == "", (name, answer)
        assert "no/such/folder" in re.sub(r"[\s│]", "", answer["err"]), (name, answer)


def test_an_option_that_does_not_exist_is_bad_usage():
    for name, answer in ask(ASK_UNKNOWN)["answers"].items():
        assert answer["code"] == 2 and "--no-such-option" in answer["err"], (name, answer)
        assert "Traceback" not in answer["err"], (name, answer)


COMPLETE = "import sys; sys.argv[0] = 'thermocline'\nfrom thermocline.cli import main\nmain()"


@pytest.mark.parametrize("typed, offered", [("", ["doctor", "plan", "heat"]), ("heat ", ["profile", "merge", "show", "diff"])])
def test_a_shell_completes_verbs(typed, offered):
    words = f"thermocline {typed}"
    environment = {"_THERMOCLINE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    answer = python("import atexit, sys; atexit.register(lambda: print('torch' in sys.modules))\n" + COMPLETE, **environment)
    lines = answer.splitlines()
    assert set(offered) <= set(lines)
    assert lines[-1] == "False"
