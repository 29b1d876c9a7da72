"""`hf-vit verify`."""

from pathlib import Path
from typing import Any

from hf_vit_cli import options
from hf_vit_cli.command import tell
from hf_vit_cli.options import arg, opt


@options.takes("device")
def verify(
    repo: str = arg(..., "Name on the Hub, user/name, or a folder of export --to onnx or openvino."),
    revision: str | None = opt(None, "Branch, tag or commit; by default main."),
    trust_remote_code: bool = opt(
        False, "Allow code of the repository: the card's examples and the model's remote code.", "--trust-remote-code"
    ),
    results: bool = opt(False, "Evaluate again and compare with the published results.", "--results"),
    data: list[str] | None = opt(None, "With --results: path of data that is not public; repeat for more."),
    **shared: Any,
) -> None:
    """Download a shared model, compare checksums, load and run it; with --results, evaluate it again.

    Of an exported folder: repeat the checks of its certificate on this machine.
    """
    from hf_vit.conversion.targets.graphs.certificate import NAME as CERTIFICATE
    from hf_vit.conversion.targets.graphs.certificate import verify as verify_export
    from hf_vit.environment import require
    from hf_vit.errors import UserError
    from hf_vit.hub.verify import verify_repo
    from hf_vit.repositories.hub import check_repo_id

    if (Path(repo) / CERTIFICATE).is_file():
        if revision or trust_remote_code or results or data or any(shared.values()):
            raise UserError(f"{repo} is an exported folder, which takes no options; leave them out")
        done = verify_export(Path(repo))
        tell(f"{len(done.checks)} checks repeated with {done.measured_with}: {done.describe()}")
        return
    check_repo_id(repo)
    if (data or any(shared.values())) and not results:
        raise UserError("--data and --device need --results; add it, or leave them out")
    if results:
        require("sklearn", "matplotlib", purpose="measuring results again")
    result = verify_repo(repo, revision=revision, trust_remote_code=trust_remote_code, report=tell)
    tell(result.describe())
    if results:
        from hf_vit.audit.results import audit_results, check
        from hf_vit.audit.results import describe as describe_findings

        findings = audit_results(result.folder, data=data or (), **shared, report=tell)
        tell(describe_findings(findings))
        check(findings)
