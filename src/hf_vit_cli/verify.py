"""`hf-vit verify`."""

from pathlib import Path
from typing import Any

from hf_vit_cli import options
from hf_vit_cli.command import print_safely, print_table
from hf_vit_cli.options import arg, opt


@options.with_options("device")
def verify(
    repo: str = arg(
        ..., "Repository on the Hub (user/name); a folder with an exported graph; with --doors a saved model."
    ),
    revision: str | None = opt(None, "Branch, tag or commit. Default: main."),
    trust_remote_code: bool = opt(
        False, "Run code from the repository: the card's examples and the model's remote code.", "--trust-remote-code"
    ),
    results: bool = opt(False, "Also evaluate the model again and compare with the published results.", "--results"),
    doors: bool = opt(
        False,
        "Compare a saved classifier's answers in torch, transformers, handler.py, ONNX Runtime, OpenVINO, browser.",
        "--doors",
    ),
    data: list[str] | None = opt(
        None,
        "With --results: data set that is not public, given as in --data of evaluate; repeat for more. With --doors: "
        "data set whose test images are used. Default: the model's built-in data, else photos.",
    ),
    runtime: Path | None = opt(
        None, "With --doors: folder with the files of ONNX Runtime Web. Default: download them once.", metavar="DIR"
    ),
    **shared: Any,
) -> None:
    """Download a shared model, compare checksums, load and run it; with --results, evaluate it again.

    For an exported folder: repeat the checks of its certificate on this machine. With --doors: compare a saved
    classifier's answers everywhere it runs, and write doors.json into its folder.
    """
    from hf_vit.conversion.targets.graphs.certificate import NAME as CERTIFICATE
    from hf_vit.conversion.targets.graphs.certificate import verify as verify_export
    from hf_vit.environment import require
    from hf_vit.errors import UserError
    from hf_vit.hub.verify import verify_repo
    from hf_vit.repositories.hub import check_repo_id

    has_device = any(shared.values())
    if doors:
        if revision or trust_remote_code or results or has_device or len(data or []) > 1:
            raise UserError("--doors takes one --data and --runtime, and no other options; remove the others")
        from hf_vit.audit.doors import NAME, require_equal_doors, verify_doors

        certificate = verify_doors(repo, *(data or []), runtime=runtime, report=print_safely)
        print_table(certificate.rows(), "door", "labels equal", f"difference (at most {certificate.bound:.0e})", "")
        print_safely(f"recorded in {Path(repo) / NAME}")
        require_equal_doors(certificate)
        return
    if runtime is not None:
        raise UserError("--runtime needs --doors; add --doors, or remove it")
    if (Path(repo) / CERTIFICATE).is_file():
        if revision or trust_remote_code or results or data or has_device:
            raise UserError(f"{repo} is an exported folder, which is verified without other options; leave them out")
        certificate = verify_export(Path(repo))
        print_safely(
            f"{len(certificate.checks)} checks repeated with {certificate.measured_with}: {certificate.describe()}"
        )
        return
    if Path(repo).is_dir():
        remedy = "or, for the repository of this name, run the command in another folder"
        raise UserError(f"{repo} is a folder, not a repository; add --doors, {remedy}")
    check_repo_id(repo)
    if (data or has_device) and not results:
        raise UserError("--data and --device only work with --results; add --results, or leave them out")
    if results:
        require("sklearn", "matplotlib", purpose="hf-vit verify --results")
    result = verify_repo(repo, revision=revision, trust_remote_code=trust_remote_code, report=print_safely)
    print_safely(result.describe())
    if results:
        from hf_vit.audit.results import audit_results, require_equal

        findings = audit_results(result.folder, data=data or (), **shared, report=print_safely)
        print_safely("\n".join(map(str, findings)))
        require_equal(findings)
