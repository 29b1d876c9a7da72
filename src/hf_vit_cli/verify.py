"""`hf-vit verify`."""

from pathlib import Path
from typing import Any

from hf_vit_cli import options
from hf_vit_cli.command import print_safely
from hf_vit_cli.options import arg, opt


@options.with_options("device")
def verify(
    repo: str = arg(
        ..., "Repository on the Hub (user/name), or a folder written by hf-vit export --to onnx or openvino."
    ),
    revision: str | None = opt(None, "Branch, tag or commit. Default: main."),
    trust_remote_code: bool = opt(
        False, "Run code from the repository: the card's examples and the model's remote code.", "--trust-remote-code"
    ),
    results: bool = opt(False, "Also evaluate the model again and compare with the published results.", "--results"),
    data: list[str] | None = opt(
        None, "With --results: data set that is not public, given as in --data of evaluate; repeat for more."
    ),
    **shared: Any,
) -> None:
    """Download a shared model, compare checksums, load and run it; with --results, evaluate it again.

    For an exported folder: repeat the checks of its certificate on this machine.
    """
    from hf_vit.conversion.targets.graphs.certificate import NAME as CERTIFICATE
    from hf_vit.conversion.targets.graphs.certificate import verify as verify_export
    from hf_vit.environment import require
    from hf_vit.errors import UserError
    from hf_vit.hub.verify import verify_repo
    from hf_vit.repositories.hub import check_repo_id

    if (Path(repo) / CERTIFICATE).is_file():
        if revision or trust_remote_code or results or data or any(shared.values()):
            raise UserError(f"{repo} is an exported folder, which is verified without other options; leave them out")
        certificate = verify_export(Path(repo))
        print_safely(
            f"{len(certificate.checks)} checks repeated with {certificate.measured_with}: {certificate.describe()}"
        )
        return
    check_repo_id(repo)
    if (data or any(shared.values())) and not results:
        raise UserError("--data and --device only work with --results; add --results, or leave them out")
    if results:
        require("sklearn", "matplotlib", purpose="hf-vit verify --results")
    result = verify_repo(repo, revision=revision, trust_remote_code=trust_remote_code, report=print_safely)
    print_safely(result.describe())
    if results:
        from hf_vit.audit.results import audit_results, format_findings, require_equal

        findings = audit_results(result.folder, data=data or (), **shared, report=print_safely)
        print_safely(format_findings(findings))
        require_equal(findings)
