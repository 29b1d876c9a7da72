"""Try all cases of a campaign; a stopped one resumes where it was. Without a name: write the table of SECURITY.md."""

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path

from campaigns import NAMES
from campaigns.engine import FAILED, RESULTS, ROOT, Campaign, failures

SECURITY = ROOT / "SECURITY.md"
BEGIN, END = "<!-- campaigns -->\n", "<!-- end of campaigns -->\n"


def campaign_of(name: str) -> Campaign:
    return importlib.import_module(f"campaigns.{name}").CAMPAIGN


def table() -> str:
    lines = ["| campaign | promise | cases | not as promised | last run |", "|---|---|---|---|---|"]
    for name in NAMES:
        file, last = RESULTS / f"{name}.json", ("", "", "not run to its end in this form")
        if file.exists():
            record = json.loads(file.read_text())
            outcomes = [item for row in record["rows"] for item in row["outcomes"].items()]
            broken = sum(count for outcome, count in outcomes if outcome.startswith(FAILED))
            version = record["versions"]["hf-vit"]
            last = (f"{record['cases']:,}", broken, f"{record['date']}, {record.get('commit') or version}")
        lines.append(f"| `{name}` | {campaign_of(name).promise} | {' | '.join(map(str, last))} |")
    return "".join(f"{line}\n" for line in lines)


def security_page() -> str:
    page = SECURITY.read_text()
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    return f"{before}{BEGIN}{table()}{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns", description=__doc__)
    parser.add_argument("name", choices=NAMES, nargs="?")
    parser.add_argument("--list", action="store_true", help="print the cases instead of trying them")
    parser.add_argument("--only", default="", metavar="REGEX", help="try these cases again")
    arguments = parser.parse_args()
    if arguments.name is None:
        SECURITY.write_text(security_page())
        return 0
    campaign = campaign_of(arguments.name)
    if arguments.list:
        print(*campaign.cases(), sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        failed = failures(campaign.run(Path(folder), arguments.only))
    print(*failed, f"{campaign.name}: {len(failed)} broken promises", sep="\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
