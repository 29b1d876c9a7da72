"""The program's entry: quick answers, how commands are given what they need, what is said of a typing error."""

import errno
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.util import module_from_spec
from pathlib import Path
from typing import Annotated
from unittest.mock import Mock

import pytest
import typer
from rich.text import Text

import hf_vit
from hf_vit_cli.command import format_command
from hf_vit_cli.main import build_app, main

ROOT = Path(__file__).parents[2]
QUIET = {**os.environ, "_TYPER_FORCE_DISABLE_TERMINAL": "1", "COLUMNS": "100"}


def commands(group=None, path=()):
    """(words of the path, command) of every command, those of groups as well."""
    for name, command in (group or typer.main.get_command(build_app())).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = {" ".join(path): command for path, command in commands()}


# What takes seconds to import is barred: an answer that looked for it would end in a traceback.
QUICK = """
import io, json, sys
from contextlib import redirect_stdout

class Bar:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hf_vit", "torch", "transformers", "numpy", "datasets", "huggingface_hub", "PIL"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Bar())
from hf_vit_cli.command import format_command
from hf_vit_cli.main import main

for line in json.loads(sys.argv[1]):
    with redirect_stdout(io.StringIO()) as printed:
        try:
            main(line)
        except SystemExit as ended:
            print(json.dumps([line, ended.code, printed.getvalue()]), file=sys.__stdout__)
"""


def test_help_version_and_misuse_need_no_library():
    lines = [["--help"], ["--version"], [], ["bench", "--help"], *([*name.split(), "--help"] for name in COMMANDS)]
    wrong = [["finetun"], ["finetune"], ["evaluate", "--no-such"], ["finetune", "--config", "no-such-file"]]
    finished = subprocess.run(
        [sys.executable, "-c", QUICK, json.dumps(lines + wrong)], env=QUIET, capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stderr
    answers = [json.loads(line) for line in finished.stdout.splitlines()]
    assert [answer[0] for answer in answers] == lines + wrong
    for line, code, printed in answers[: len(lines)]:
        assert (code, printed == "") == (0, False), line
    assert [(code, printed) for _, code, printed in answers[len(lines) :]] == [(2, "")] * len(wrong)
    assert len(finished.stderr.splitlines()) == len(wrong), "one line each"


def test_help_names_only_options_of_its_own_command():
    for name, command in COMMANDS.items():
        known = {f"--{parameter.name}"[:end] for parameter in command.params for end in (None, -1)}
        known |= {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        for parameter in command.params:
            text = (getattr(parameter, "help", None) or "").replace("as in --data of ", "")
            assert Text.from_markup(text).plain == text, "a terminal shows no [words] in brackets"
            assert {*re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)} <= known, (name, parameter.name)


def test_completion_needs_no_library():
    variables = {"_HF_VIT_COMPLETE": "complete_bash", "COMP_WORDS": "hf-vit fin", "COMP_CWORD": "1"}
    finished = subprocess.run(
        [sys.executable, "-c", QUICK, "[[]]"], env=QUIET | variables, capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout) == [[], 0, "finetune\n"]


def test_the_version_is_one(command):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert command("--version") == (0, f"hf-vit {project['version']}\n", "")
    assert hf_vit.__version__ == project["version"]
    assert project["scripts"] == {"hf-vit": "hf_vit_cli.main:main"}


@pytest.mark.parametrize(
    ("typed", "position", "offered"),
    [
        ("hf-vit fine", 1, ["finetune"]),
        ("hf-vit bench ", 2, ["models", "saved", "data"]),
        ("hf-vit finetune --learning", 2, ["--learning-rate"]),
        ("hf-vit convert --ver", 2, ["--verify"]),
    ],
)
def test_bash_completes(typed, position, offered, command, monkeypatch):
    monkeypatch.setenv("_HF_VIT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(position))
    code, out, err = command()
    assert (code, out.split(), err) == (0, offered, "")


def test_completion_can_be_installed(tmp_path, command, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("shellingham.detect_shell", lambda *_: ("bash", "/bin/bash"))
    code, script, err = command("--show-completion")
    assert (code, err) == (0, "")
    assert "complete -o default -F _hf_vit_completion hf-vit" in script
    code, out, err = command("--install-completion")
    assert (code, err) == (0, "")
    assert "bash completion installed" in out
    written = [path for path in tmp_path.rglob("*") if path.is_file() and "_hf_vit_completion" in path.read_text()]
    assert written


def test_torch_is_not_heard_complaining_of_torchao():
    """Two lines before every answer of version 0.1; what else torch has to say of the same module is heard."""
    heard = []
    logger = logging.getLogger("torch.utils._pytree")
    listener = logging.Handler()
    listener.emit = lambda record: heard.append(record.getMessage())
    logger.addHandler(listener)
    logger.warning("%s is an Enum subclass and is now natively supported by torch.compile", "<enum 'Kernel'>")
    logger.warning("<enum 'Mine'> is already registered")
    logger.removeHandler(listener)
    assert heard == ["<enum 'Mine'> is already registered"]


def test_python_m_prints_no_foreign_line_and_imports_nothing_for_help():
    """It imports the package before the program."""
    program = [sys.executable, "-X", "importtime", "-m", "hf_vit"]
    done = subprocess.run([program[0], *program[3:], "recipes", "no-such-recipe"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("hf-vit: ")
    done = subprocess.run([*program, "--help"], capture_output=True, text=True)
    assert (done.returncode, "finetune" in done.stdout) == (0, True)
    assert not re.findall(r"\| +(transformers|torch|numpy)$", done.stderr, flags=re.MULTILINE)


@pytest.mark.parametrize(("module", "registers"), [("hf_vit", False), ("mine.train", True)])
def test_python_m_of_a_package_that_imports_this_one_registers_the_families(module, registers, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-m", "--steps"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", module, "--steps"])
    families = Mock()
    monkeypatch.setitem(sys.modules, "hf_vit.families", families)
    hf_vit.__spec__.loader.exec_module(module_from_spec(hf_vit.__spec__))
    assert families.register.called is registers


def read(command, words):
    """The values of what was typed."""
    return command.make_context("command", words, resilient_parsing=True).params


@pytest.mark.parametrize("name", COMMANDS)
def test_arguments_can_be_given_by_name(name):
    """`--model` and `--output` mean the same in every command, wherever they stand."""
    command = COMMANDS[name]
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    required = [each for each in command.params if each.required and each not in arguments]
    options = [word for each in required for word in (each.opts[0], "d")]
    places = [f"./{each.name}" for each in arguments]
    expected = read(command, [*places, *options])
    named = [word for each in reversed(arguments) for word in (f"--{each.name.removesuffix('s')}", f"./{each.name}")]
    assert read(command, [*named, *options]) == read(command, [*options, *named]) == expected
    for count in range(1, len(arguments)):
        last = named[: 2 * (len(arguments) - count)]
        assert read(command, [*places[:count], *options, *last]) == expected
        first = [word for pair in zip(named[-2::-2], places, strict=False) for word in pair][: 2 * count]
        assert read(command, [*options, *places[count:], *first]) == expected


def test_every_command_names_model_and_output_alike():
    """`finetune --model M` and `convert SOURCE OUT`, which were the only spelling, stay."""
    without_model = {"data", "demo", "recipes", "scaling-law", "verify", "models", "bench models"}
    without_output = {"recipes", "cost", "card", "push", "verify", "bench data"}
    names = {name: [each.name for each in command.params] for name, command in COMMANDS.items()}
    assert {name for name in names if {"model", "models"} & set(names[name])} == set(COMMANDS) - without_model
    assert {name for name in names if "output" in names[name]} == set(COMMANDS) - without_output
    for command in set(COMMANDS) - without_model:
        first = COMMANDS[command].params[0]
        assert (first.name.removesuffix("s"), first.param_type_name) == ("model", "argument"), command
    assert read(COMMANDS["cost"], ["--model", "a", "--model", "b"])["model"] == "b", "the last one counts"
    several = read(COMMANDS["compare"], ["--model", "a", "--model=b", "--data", "d", "--output", "o"])
    assert list(several["models"]) == ["a", "b"]


def test_every_command_that_reads_labelled_images_takes_the_columns_of_a_list():
    without = {"bench data", "analyze", "verify"}  # images alone; and several data sets, of columns as usual
    options = {name: {each.name for each in COMMANDS[name].params} for name in set(COMMANDS) - without}
    assert [n for n, each in options.items() if "data" in each and not each >= {"image_column", "label_column"}] == []


REQUIRED = {name: [each for each in command.params if each.required] for name, command in COMMANDS.items()}


@pytest.mark.parametrize("name", [name for name, required in REQUIRED.items() if required])
def test_all_that_is_missing_is_told_at_once(name, command):
    code, out, err = command(*name.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    shown = err.removeprefix("hf-vit: ").partition(" must be given; ")[0].split(" and ")
    assert shown == [f"--{each.name.removesuffix('s') if each.nargs < 0 else each.name}" for each in REQUIRED[name]]


def test_finetune_shows_first_what_people_need_first():
    options = [each for each in COMMANDS["finetune"].params if each.param_type_name == "option"]
    first = {each.name for each in options if not each.rich_help_panel}
    assert len(first) == 20
    assert first > {"data", "output", "recipe", "epochs", "batch_size", "learning_rate", "resume"}


@pytest.mark.parametrize("client", ["datasets", "huggingface_hub"])
def test_a_log_has_no_bars(client, command, monkeypatch):
    """Neither where the client was imported before, as by a program that calls ours."""
    quiet = Mock()
    monkeypatch.setattr(f"{client}.utils.disable_progress_bars", quiet)
    assert command("recipes")[0] == 0
    quiet.assert_called_once_with()


def test_who_waits_for_libraries_sees_it(command, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, out, err = command("recipes", "nosuch")
    assert (code, out) == (1, "")
    assert err.startswith("hf-vit recipes: loading libraries ...\r\x1b[Khf-vit: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("finetun", "no such command 'finetun'. Did you mean 'finetune'?; hf-vit --help lists all options"),
        ("evaluate m --data d --batch 3", "no such option: --batch"),
        ("evaluate m --data d --batch-size 0", "--batch-size '0': "),
        ("evaluate m --data d --seed x", "--seed 'x': "),
        ("evaluate m more --data d", "got unexpected extra argument(s) (more)"),
        ("finetune --model", "--model needs a value"),
        ("finetune m --data", "option '--data' requires an argument"),
        ("finetune m --model m --data d --output o", "got unexpected extra argument(s) (m)"),
        ("bench", "missing command; hf-vit bench --help"),
        *(
            (f"finetune S/16 {switch} --data d --output o", f"--streaming takes no value, but got '{value}'{remedy}")
            for switch, value, remedy in (
                ("--streaming true", "true", "; write --streaming, or leave it out"),
                ("--streaming=False", "False", ""),
                ("--streaming 1", "1", ""),
            )
        ),
    ],
)
def test_misuse_is_told_in_one_line(words, message, command):
    code, out, err = command(*words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"hf-vit: {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("learning-rat: 1", "'learning-rat' is not an option; did you mean learning_rate?"), ("7", "holds no options"),
        ("", "holds no options"), ("a: [", "cannot be read"), ("\x00", "cannot be read"),
        ("[]", "records no run of hf-vit finetune"),
        ('[{"command": "hf-vit pretrain S/16 --data d --output o"}, 3]', "records no run of hf-vit finetune"),
        ('[{"command": "hf-vit finetune S/16 --data d --output o --sede 3"}]', "No such option: --sede"),
        ('[{"command": "hf-vit finetune \'S/16"}]', "cannot be parsed (No closing quotation)"),
        ("{learning_rate: x, data: d, output: o, model: S/16}", "--learning-rate 'x': "),
        ("{random_resized_crop: [1], data: d, output: o, model: S/16}", "--random-resized-crop '1': "),
        ("{steps: true, data: d, output: o, model: S/16}", "--steps 'True': "),
        ("config: other.yaml", "'config' is not an option; write all options into one file"),
        ("{data: d, output: '', model: S/16}", "--output is empty; give a value, or leave the option out"),
        ("{streaming: maybe, data: d, output: o, model: S/16}", "--streaming 'maybe': "),
        ("{learning_rate: .1, seed: 3}", "--model and --data and --output must be given"),
    ],
)  # fmt: skip
def test_a_config_file_is_refused_in_one_line(content, message, tmp_path, command):
    file = tmp_path / "options.yaml"
    file.write_text(content)
    code, out, err = command("finetune", "--config", file)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_config_file_counts_less_than_what_is_typed(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("{model: S/16, data: digits, learning-rate: 1e-3, streaming: true, randaugment: [2, 5], output: o}")
    words = ["--config", str(file), "--data", "photos"]
    typed = COMMANDS["finetune"].make_context("finetune", words).params
    expected = {"model": "S/16", "data": "photos", "learning_rate": 1e-3, "streaming": True, "randaugment": (2, 5)}
    assert {name: typed[name] for name in expected} == expected
    assert Path(typed["output"]) == Path("o")
    assert "config" not in typed
    # Also less than typed options that exclude those in the file.
    file.write_text(file.read_text().replace("streaming", "epochs: 9, lr_sweep: true, random_crop: 4, streaming"))
    words += ["--steps", "7", "--random-resized-crop", "0.5", "1", "--learning-rate", "0.1"]
    typed = COMMANDS["finetune"].make_context("finetune", words).params
    assert [typed[name] for name in ("epochs", "steps", "lr_sweep", "random_crop")] == [None, 7, False, None]
    assert COMMANDS["finetune"].make_context("finetune", [*words[:4], "--lr-sweep"]).params["learning_rate"] is None


def test_options_of_version_0_2_are_renamed_with_a_warning(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("unlabelled_ratio: 2")
    words = ["S/16", "--config", str(file), "--data", "d", "--output", "o", "--unlabelled=more", "--teacher", "t"]
    with pytest.warns(FutureWarning, match="is now --unlabeled") as warnings:
        typed = COMMANDS["finetune"].make_context("finetune", words).params
    assert len(warnings) == 2
    assert (typed["unlabeled"], typed["unlabeled_ratio"]) == ("more", 2)
    with pytest.warns(FutureWarning, match="--utilisation is now --utilization"):
        assert COMMANDS["cost"].make_context("cost", ["S/16", "--utilisation", ".5"]).params["utilization"] == 0.5


def test_a_stranger_s_facts_push_nothing(tmp_path):
    """A facts.json from the Hub says how a model was trained, not where the next one goes."""
    command = "hf-vit finetune S/16 --data digits --output o --seed 3 --push somebody/else --private --resume"
    (tmp_path / "facts.json").write_text(json.dumps([{"kind": "training", "command": command}]))
    words = ["--config", str(tmp_path / "facts.json"), "--output", "mine"]
    typed = COMMANDS["finetune"].make_context("hf-vit finetune", words).params
    assert (typed["push"], typed["private"], typed["resume"]) == (None, False, False)
    assert Path(typed["output"]) == Path("mine")
    assert (typed["model"], typed["seed"]) == ("S/16", 3)


def test_ctrl_c_while_options_are_read_ends_in_a_line(command, monkeypatch, tmp_path: Path):
    monkeypatch.setattr("hf_vit_cli.command.find_obstacle", Mock(side_effect=KeyboardInterrupt))
    code, out, err = command("export", "model", tmp_path / "out", "--to", "timm")
    assert (code, out, err) == (130, "", "hf-vit: stopped; no incomplete files remain\n")


def test_closed_streams_hinder_no_command(monkeypatch):
    """As a shell closes them: `hf-vit recipes 2>&- >&-`."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    for words, code in ((["recipes"], 0), (["recipes", "nosuch"], 1)):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == code
    for stream in (sys.stdout, sys.stderr):
        assert stream.name == os.devnull
        stream.close()


def test_a_working_folder_that_is_gone_is_told_in_a_line(command, monkeypatch, tmp_path: Path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, out, err = command("recipes")
    monkeypatch.chdir(tmp_path)
    assert (code, out, err) == (1, "", "hf-vit: the working directory was deleted; change to another one with cd\n")


def test_a_machine_without_a_folder_for_temporary_files_is_told_in_a_line(fails, monkeypatch):
    problem = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']")
    with monkeypatch.context() as patched:  # pytest needs such a folder
        patched.setattr("tempfile.gettempdir", Mock(side_effect=problem))
        fails(["recipes"], "no folder for temporary files", "set TMPDIR")


def test_an_output_that_is_a_link_is_written_where_it_leads(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rows.csv").touch()
    (tmp_path / "rows.csv").symlink_to("elsewhere/rows.csv")
    monkeypatch.setenv("HOME", str(tmp_path))
    for output in (str(tmp_path / "rows.csv"), "~/rows.csv"):
        typed = COMMANDS["predict"].make_context("predict", ["model", "images", f"--output={output}"]).params
        assert Path(typed["output"]) == tmp_path / "elsewhere" / "rows.csv"
    typed = COMMANDS["soup"].make_context("soup", ["a", "b", "--output=~/soup"]).params
    assert typed["output"] == tmp_path / "soup"


def _typed(*arguments: str) -> str:
    app = typer.Typer()
    found: list[str] = []

    @app.command()
    def work(
        context: typer.Context,
        places: Annotated[list[Path], typer.Argument()],
        size: Annotated[int, typer.Option()] = 3,
        range_: Annotated[tuple[float, float] | None, typer.Option("--range")] = None,
        tag: Annotated[list[str] | None, typer.Option()] = None,
        flag: Annotated[bool, typer.Option("--flag/--no-flag")] = True,
        quiet: Annotated[bool, typer.Option("--quiet", "-q")] = False,
    ) -> None:
        found.append(format_command(context))

    app(args=list(arguments), prog_name="hf-vit", standalone_mode=False)
    return found[0]


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("a b", "a b"), ("a --size 3", "a"), ("a --size 4 --quiet", "a --size 4 --quiet"), ("-q a", "a --quiet"),
        ("a --no-flag --range 0.5 1", "a --range 0.5 1.0 --no-flag"), ("a --tag x --tag y", "a --tag x --tag y"),
        ("my\\ cat", "'my cat'"),
    ],
)  # fmt: skip
def test_the_recorded_command_repeats_what_was_typed(typed: str, shown: str) -> None:
    assert _typed(*shlex.split(typed)) == f"hf-vit {shown}"
    assert _typed(*shlex.split(shown)) == f"hf-vit {shown}"
