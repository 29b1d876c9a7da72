"""What the site adds to its pages: options of the commands, the page of the digits models, files from other folders.

A page says `<!-- options -->` where the options of the command of its name belong, and `<!-- commands -->` for the list
of all: both are read from the program itself. `<!-- models -->` and `<!-- models vit-digits -->` become the page of the
models in model_cards/, made while the site is built. Links are written as they work in the repository.

python docs/hooks.py                # writes the commands into skills/hf-vit/SKILL.md, which agents read
"""

import html
import posixpath
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# File of the repository -> where it stands in the site.
PAGES = {"benchmarks/README": "benchmarks", "benchmarks/TABLES": "tables", "conversion/README": "origins"}
BORROWED = {f"{source}.md": f"{page}.md" for source, page in PAGES.items()} | {
    f"benchmarks/results/{path.name}": f"results/{path.name}" for path in (ROOT / "benchmarks/results").glob("*.png")
}
# The runtime of the page of the digits models: `make lint` installs it, and nothing is fetched while the site is built.
RUNTIME = ROOT / "page/node_modules/onnxruntime-web/dist"
MODELS = ("vit-digits", "hybrid-digits", "axial-digits")
_LIVE = "Point at a patch, paint some away, give it an image of your own: it runs in your browser, on no server."
_STILL = "One image, as the model saw it in Python: where this site was built, the runtime of the page was missing."
_MODELS = re.compile(r"<!-- models ?([\w-]*) -->")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_EMPTY_HEADER = re.compile(r"<thead>\s*<tr>\s*(?:<th[^>]*>\s*</th>\s*)+</tr>\s*</thead>\s*")
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", flags=re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take in what lies outside docs/."""
    for source, uri in BORROWED.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    folder = Path(page_of_the_models().name)
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".md"):
        files.append(File.generated(config, f"models/{path.relative_to(folder)}", abs_src_path=str(path)))
    return files


def on_shutdown() -> None:
    """The site holds a copy of it."""
    if page_of_the_models.cache_info().currsize:
        page_of_the_models().cleanup()


@cache
def page_of_the_models() -> TemporaryDirectory[str]:
    """The page of the models in model_cards/; without the runtime that of one image, in one file. Made once."""
    folder = TemporaryDirectory()
    site_folder, cards = Path(folder.name), [ROOT / "model_cards" / name for name in MODELS]
    if RUNTIME.is_dir():
        from hf_vit.pages.making import make_page

        make_page(cards, site_folder / "live", images="digits", runtime=RUNTIME)
    else:
        from hf_vit.analysis import show

        show(str(cards[0]), ROOT / "docs/images/digit.png").save(site_folder / "still.html")
    return folder


def _frame(match: re.Match[str]) -> str:
    """The page of the models, of one of them or all, as Markdown."""
    named = match[1] and f"#model={match[1]}"
    file, caption = (f"models/live/index.html{named}", _LIVE) if RUNTIME.is_dir() else ("models/still.html", _STILL)
    title, style = match[1] or ", ".join(MODELS), "width: 100%; height: 60rem; border: 0"
    frame = f'<iframe src="{file}" title="{title}" allow="camera" loading="lazy" style="{style}"></iframe>'
    return f"{frame}\n\n*{caption}*"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in options and commands; let links lead to pages of the site, or leave their text."""
    uri = page.file.src_uri
    if "<!-- options -->" in markdown:
        markdown = markdown.replace("<!-- options -->", "\n".join(options(Path(uri).stem)))
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", "\n".join(commands()))
    markdown = _MODELS.sub(_frame, markdown)
    pieces = _CODE.split(_hide_code_in_links(markdown))
    pieces[::2] = [_LINK.sub(lambda match: _link(match, uri), piece) for piece in pieces[::2]]
    return "".join(pieces).replace("\0", "`")


def _hide_code_in_links(markdown: str) -> str:
    return re.sub(r"\[`([^`\]]*)`\]\(", "[\0\\1\0](", markdown)


def _link(match: re.Match[str], uri: str) -> str:
    image, text, address = match.groups()
    target, mark, fragment = address.partition("#")
    if not target or ":" in target:
        return match[0]
    source = next((path for path, borrowed in BORROWED.items() if borrowed == uri), f"docs/{uri}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if path in BORROWED:
        page = BORROWED[path]
    elif path.startswith("docs/"):
        page = path.removeprefix("docs/")
    else:
        return text
    return f"{image}[{text}]({posixpath.relpath(page, posixpath.dirname(uri) or '.')}{mark}{fragment})"


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Take the empty header rows away that Markdown gives to tables without a header."""
    return _EMPTY_HEADER.sub("", content)


@cache
def program() -> Any:
    """The command line as typer sees it."""
    import typer

    from hf_vit_cli.main import build_app

    return typer.main.get_command(build_app())


def commands() -> Iterator[str]:
    """A table of all commands, each with its page."""
    yield "| command | |\n|---|---|"
    for name, command in program().commands.items():
        yield f"| [`{name}`]({name}.md) | {_text(command.help)} |"


def options(name: str) -> Iterator[str]:
    """Usage, arguments and options of `hf-vit NAME`, those of a group command by command."""
    root = program()
    command = root.commands[name]
    context = command.context_class(command, info_name=f"hf-vit {name}")
    yield from _described(command, context)
    for subcommand, nested_command in getattr(command, "commands", {}).items():
        yield f"\n## hf-vit {name} {subcommand}\n"
        yield from _described(
            nested_command, nested_command.context_class(nested_command, info_name=subcommand, parent=context)
        )


def _described(command: Any, context: Any) -> Iterator[str]:
    yield f"{_text(command.help)}\n\n```text\n{command.get_usage(context)}\n```\n"
    panels: dict[str, list[str]] = {}
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None:  # hidden ones have none
            panel = parameter.rich_help_panel or f"{parameter.param_type_name.capitalize()}s"
            panels.setdefault(panel, []).append(f"| `{_cell(record[0])}` | {_text(record[1])} |")
    for panel, rows in panels.items():
        yield f"\n**{_text(panel)}**\n\n| | |\n|---|---|"
        yield from rows


def _text(text: str | None) -> str:
    return _cell(html.escape(" ".join((text or "").split()), quote=False))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt: every page with its title and first sentence, every command with its help."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", ""]
    for path in sorted((ROOT / "docs").glob("*.md")):
        title, text = path.read_text(encoding="utf-8").removeprefix("# ").split("\n", 1)
        blocks = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).split("\n\n")
        first = next((" ".join(block.split()) for block in blocks if block.lstrip("\n")[:1].isalpha()), "")
        lines.append(f"- [{title}]({path.stem}.html): {re.split(r'(?<=[.]) ', first)[0]}")
    lines += ["", "## Commands", ""]
    lines += [f"- [hf-vit {name}](commands/{name}.html): {text}" for name, text in summaries()]
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def summaries() -> Iterator[tuple[str, str]]:
    """Every command with its help on one line."""
    for name, command in program().commands.items():
        yield name, " ".join((command.help or "").split())


def skill(text: str) -> str:
    """The text of SKILL.md with the commands of now."""
    head, _, rest = text.partition("<!-- commands -->\n")
    lines = [f"- `hf-vit {name}`: {summary}\n" for name, summary in summaries()]
    return "".join([head, "<!-- commands -->\n", *lines, "<!-- end -->", rest.partition("<!-- end -->")[2]])


if __name__ == "__main__":
    SKILL = ROOT / "skills/hf-vit/SKILL.md"
    SKILL.write_text(skill(SKILL.read_text(encoding="utf-8")), encoding="utf-8")
