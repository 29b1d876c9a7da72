"""The documentation site's pages: all there, in its contents, nothing public left out, tables from the records."""

import importlib
import importlib.util
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import markdown
import numpy as np
import pytest
import typer
import yaml

from hf_vit_cli.main import COMMANDS, build_app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SKILL = ROOT / "skills/hf-vit/SKILL.md"
CONTENTS = re.findall(r"^ *- [^:\n]+: ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
# Pages that docs/hooks.py takes from other folders.
BORROWED = {"benchmarks.md", "origins.md", "tables.md"}
ROOMS = ("data", "training", "evaluation", "analysis", "comparison", "cost", "conversion")


def test_contents_name_every_page_once():
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert sorted(CONTENTS) == sorted(written | BORROWED)


def test_every_command_has_its_page():
    pages = {path.stem for path in (DOCS / "commands").glob("*.md")} - {"index"}
    assert pages == set(COMMANDS)
    for name in COMMANDS:
        page = (DOCS / f"commands/{name}.md").read_text()
        assert page.startswith(f"# hf-vit {name}\n")
        assert f"\nhf-vit {name} " in page, "a page shows the command"
        assert page.count("\n<!-- options -->\n") == 1


@pytest.mark.parametrize("page", [ROOT / "README.md", SKILL, *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.stem)
def test_commands_that_pages_show_can_be_typed(page: Path):
    """Their names, arguments, options and values exist; tests/test_readme.py runs those of the first pages."""
    commands = typer.main.get_command(build_app()).commands  # pyright: ignore[reportAttributeAccessIssue]
    text = page.read_text()
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"^ {4}(hf-vit .*\n)", text, flags=re.MULTILINE)
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line, comments=True) or [""]
        if program == "hf-vit" and not {"...", "|", ">", "&&", "--help", "--config"} & {*words} and "$" not in line:
            command = commands[words.pop(0)]
            while hasattr(command, "commands"):
                command = command.commands[words.pop(0)]
            command.make_context("hf-vit", words)


def test_messages_name_only_options_that_exist():
    commands, known = [typer.main.get_command(build_app())], {"--help"}
    for command in commands:  # grows by the commands of each group
        commands += getattr(command, "commands", {}).values()
        for parameter in command.params:
            known |= {*parameter.opts, *parameter.secondary_opts, f"--{parameter.name}", f"--{parameter.name}"[:-1]}
    pages = runpy.run_path(str(DOCS / "texts.py"))
    foreign = {"--directory", "--force-reinstall", "--num-cpus", "--upgrade", "--user-data-dir"}  # of other programs
    for path in pages["source_files"]():
        for line, _, text in pages["texts"](path):
            unknown = {*re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)} - known - foreign
            assert not unknown, f"{path}:{line}"


def test_the_skill_lists_the_commands_of_now():
    """`python docs/hooks.py` writes them. Its head is what agents choose it by."""
    text = SKILL.read_text()
    assert runpy.run_path(str(DOCS / "hooks.py"))["skill"](text) == text
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["name"] == SKILL.parent.name
    assert len(head["description"]) < 1024


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "conversion/README.md", "tests/golden/README.md"])
def test_pages_for_developers_name_what_exists(page: str):
    text = (ROOT / page).read_text()
    paths = re.findall(r"`((?:src|conversion|tests|benchmarks|campaigns)/[\w/.-]+)`", text)
    assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == []
    if page == "CONTRIBUTING.md":
        files = [path for place in ("src", "conversion", "tests") for path in (ROOT / place).rglob("*.py")]
        words = set(re.findall(r"\w+", "".join(path.read_text() for path in files)))
        assert {*re.findall(r"`(\w*_\w+)`", text)} - words == set()


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_are_shown_by_their_public_names(room: str):
    assert importlib.import_module(f"hf_vit.{room}").__all__
    assert f"::: hf_vit.{room}\n" in (DOCS / f"reference/{room}.md").read_text()


def test_every_public_name_of_the_package_is_in_the_reference():
    import hf_vit

    listed = set(re.findall(r"^ +- (\w+)$", (DOCS / "reference/index.md").read_text(), flags=re.MULTILINE))
    shown = set(re.findall(r"^::: ([\w.]+)$", (DOCS / "reference/models.md").read_text(), flags=re.MULTILINE))
    for name in hf_vit.__all__:
        assert name in listed or getattr(hf_vit, name).__module__ in shown, name


def test_every_travelling_module_is_in_the_reference():
    shown = re.findall(r"^::: hf_vit\.models\.(\w+)$", (DOCS / "reference/models.md").read_text(), flags=re.MULTILINE)
    written = {path.stem for path in (ROOT / "src/hf_vit/models").glob("*.py")} - {"__init__"}
    assert sorted(shown) == sorted(written)


def test_tables_without_a_header_have_no_empty_one():
    hooks = runpy.run_path(str(DOCS / "hooks.py"))
    page = markdown.markdown("| | |\n|---|---|\n| a | b |\n\n| c | |\n|---|---|\n| d | e |\n", extensions=["tables"])
    shown = hooks["on_page_content"](page, None, None, None)
    assert page.count("<thead>") == 2
    assert re.findall(r"<th>(.*?)</th>", shown) == ["c", ""]
    assert re.findall(r"<td>(.*?)</td>", shown) == ["a", "b", "d", "e"]


def test_without_the_runtime_the_site_holds_one_image(tmp_path: Path):
    """And says so, where else the page runs."""
    hooks = runpy.run_path(str(DOCS / "hooks.py"))
    make = hooks["page_of_the_models"]
    make.__wrapped__.__globals__["RUNTIME"] = tmp_path / "none"
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    shown = hooks["on_page_markdown"]((DOCS / "index.md").read_text(), page, None, None)
    (file,) = re.findall(r'<iframe src="models/([^"]+)"', shown)
    assert "*One image, as the model saw it in Python" in shown
    still = Path(make().name) / file
    assert "vit-digits" in still.read_text()
    hooks["on_shutdown"]()
    assert not still.exists()


def test_search_needs_no_server_and_no_network():
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.SafeLoader)
    assert {"search", "offline"} <= {name for name in site["plugins"] if isinstance(name, str)}
    assert [(DOCS / script).is_file() for script in site["extra"]["polyfills"]] == [True]


def test_pictures_of_the_figures_are_there_and_small():
    pictures = list((DOCS / "images/figures").iterdir())
    page = (DOCS / "analysis.md").read_text()
    assert pictures
    assert {path.name for path in pictures} <= set(re.findall(r"images/figures/([\w.-]+)", page))
    assert all(path.stat().st_size < 150_000 for path in pictures)


# `benchmarks/tables.py` writes the tables of the docs from the records.
SPEC = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tables)
PAGES = {str(path.relative_to(ROOT)): path for path in tables.pages()}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_tables_of_the_records(page: str):
    text = PAGES[page].read_text(encoding="utf-8")
    assert text == tables.rewrite(text), "run `make tables`"
    assert text.count("<!-- end -->") == len(tables.MARKED.findall(text)), "a marker is broken"


def test_every_table_and_every_record_is_used():
    shown = {name for path in PAGES.values() for _, name, _ in tables.MARKED.findall(path.read_text(encoding="utf-8"))}
    assert shown == set(tables.TABLES)
    source = (ROOT / "benchmarks" / "tables.py").read_text(encoding="utf-8")
    for path in tables.RESULTS.glob("*.json*"):
        script = re.sub(rf"_({'|'.join(tables.PROCESSORS)})$", "", path.stem)
        assert re.search(rf'"{script}[_."]', source) or script in ("compat", "models"), f"no table reads {path.name}"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch):
    """Return the function that imports a script and sets its arguments."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)

    def load(name: str, *arguments: str):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        return importlib.import_module(name)

    return load


@pytest.mark.parametrize("name", ["compare_families", "shape_texture"])
def test_a_script_without_options_has_no_other_settings_than_its_record(name: str, benchmark, monkeypatch):
    """Or runs of both would be in one row of its table."""

    def list_missing(self, jobs, *_, **__):
        raise LookupError([job for job, _ in jobs if self.find(job) is None])

    monkeypatch.setattr(benchmark("records").Records, "work", list_missing)
    with pytest.raises(LookupError) as missing:
        benchmark(name).main()
    assert missing.value.args == ([],)


def test_other_settings_have_a_record_of_their_own(benchmark, capsys):
    options = benchmark("records").script_options(None, "data_scale.jsonl", benchmark("data_scale").Plan)
    options.parse_args(["--seeds", "1", "0", "--models", "ViT"])
    options.parse_args(["--seen", "100", "--output", "build/smoke.jsonl"])
    for other in (["--seen", "100"], ["--seeds", "0", "3"]):
        with pytest.raises(SystemExit):
            options.parse_args(other)
        assert f"data_scale.jsonl of results/ has other {other[0][2:]}; give --output FILE" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["images", "photos"])
def test_what_another_process_has_made_meanwhile_is_taken(part: str, tmp_path: Path, benchmark, monkeypatch):
    script = benchmark("real_images")
    digits, all_labels = np.zeros((script.ALL + 2, 1, 1), np.uint8), np.arange(script.ALL + 2, dtype=np.uint8) % 10
    for name, values in {"images-idx3": digits, "labels-idx1": all_labels}.items():
        script.write_idx(tmp_path / f"train-{name}-ubyte", values)
        script.write_idx(tmp_path / f"t10k-{name}-ubyte", values[:20])
    trainings, job = script.Trainings(script.Plan(), tmp_path, tmp_path / "kept", tmp_path), {"images": 16, "seed": 0}
    make = {"images": lambda: trainings.images(20, 0), "photos": lambda: trainings.photos(job, 16)}[part]
    settle = script.settle

    def be_second(folder: Path, place: Path) -> None:
        shutil.copytree(folder, place)
        settle(folder, place)

    monkeypatch.setattr(script, "settle", be_second)
    made = Path(make())
    assert [*made.parent.iterdir()] == [made]
    assert any(made.iterdir())


def test_rows_of_local_attention_fill_their_table(tmp_path: Path, benchmark, monkeypatch):
    script = benchmark("attention", "local", "--turns", "1", "--threads", "2", "--output", str(tmp_path / "local.json"))
    monkeypatch.setattr(script, "LOCAL_SIDE", 8)
    monkeypatch.setattr(script, "LOCAL_SIDES", (8,))
    script.main()
    rows = [line.split(" | ") for line in tables.TABLES["local"](tmp_path / "local.json").splitlines()[2:-2]]
    assert [row[1:3] for row in rows] == [["2", "8"]] * 5
