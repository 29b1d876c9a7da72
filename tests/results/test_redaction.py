"""What is recorded: no secret in any disguise, no place on this machine; what is none of these stays as it is."""

import pytest

from hf_vit.results.redaction import find_secret, redact_arguments, redact_command, redact_text, redact_values

TOKENS = (
    "hf_" + "aB3" * 12, "api_org_" + "Zz9" * 10, "ghp_" + "x1Y2" * 9, "github_pat_" + "11ABC_" * 6,
    "glpat-" + "a1b2c3d4e5" * 2, "sk-ant-api03-" + "q7" * 12, "AKIA" + "ABCDEFGH12345678", "AIza" + "Sy0-_" * 7,
    "ya29." + "a0Af" * 8, "pypi-AgEIcHlwaS5vcmc" + "x7" * 12, "npm_" + "b8Y2" * 9, "dapi" + "0a1b" * 8,
    "sk-proj-" + "q7" * 12, "xoxb-" + "1234567890-ab", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-_123",
)  # fmt: skip
# Nothing of this is secret, though it sounds or looks like it.
HARMLESS = (
    "hf_hybrid_vit",
    "hf_vit_push_20310203",
    "--pooling token --use_class_token true --num-register-tokens 4",
    "class_token=mean, distillation-token=0.5",
    "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "https://host/vit/B_16.npz#L10",
    "hf://google/vit-base@main/model.safetensors",
    "gs://vit_models/imagenet21k/ViT-B_16.npz",
    "half 1/2, 3/4 of a/b",
    "--image-key jpg --label_key cls",
    "task-specific risk-aware sk-learn-like-estimators-here",
)


@pytest.mark.parametrize("token", TOKENS)
def test_tokens_are_known_by_their_pattern(token: str) -> None:
    for text in (token, f"pushed with {token}.", f"x={token}&y", f'{{"a": "{token}"}}', f"line\n{token}\n"):
        assert find_secret(text)
        assert token not in redact_text(text)
        assert not find_secret(redact_text(text))


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text: str) -> None:
    assert not find_secret(text)
    assert redact_text(text) == text
    assert redact_arguments(text.split()) == text.split()


def test_the_scheme_of_a_header_stays() -> None:
    for text in ("Authorization=Bearer", "authorization: Bearer", "see --authorization Bearer"):
        assert redact_text(f"{text} ab/cd") == f"{text} REDACTED"


def test_a_private_key_goes_as_a_whole() -> None:
    lines = ("-----BEGIN RSA PRIVATE KEY-----", "MIIEowIBAAK", "-----END RSA PRIVATE KEY-----")
    assert find_secret("\n".join(lines))
    assert redact_text("key:\n" + "\n".join(lines) + "\nend") == "key:\nREDACTED\nend"


@pytest.mark.parametrize(
    "option",
    ["--hub_token", "--hub-token", "--token", "--wandb_key", "--wandb-api-key", "--api_key", "--password", "--HF_TOKEN",
     "--aws_secret_access_key", "--db.passwd", "-token", "--client-secret", "--auth"],
)  # fmt: skip
def test_options_that_sound_secret_lose_their_value(option: str) -> None:
    assert redact_arguments([option, "v4lue", "next"]) == [option, "REDACTED", "next"]
    assert redact_arguments([f"{option}=v4lue", "next"]) == [f"{option}=REDACTED", "next"]
    assert redact_arguments([option, "--seed", "1"]) == [option, "--seed", "1"]
    for text in (f"train {option} v4lue --seed 1", f"train {option}='v4 lue' --seed 1", f"it's {option} v4lue"):
        assert "v4" not in redact_text(text)
        assert option in redact_text(text)


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("http://ann:pw@host:8000/x.npz?X-Amz-Signature=abc&b=2", "http://host:8000/x.npz"),
        ("https://ann@host/x.npz", "https://host/x.npz"),
        ("https://ann:p@ss?w#@host/x.npz", "https://host/x.npz"),
        ("https://host/x.npz#access_token=abc", "https://host/x.npz"),
        ("s3://key:secret@bucket/x.npz", "s3://bucket/x.npz"),
        ("file:///home/ann/x.npz", "x.npz"),
        ("file:/home/ann/x.npz and more", "x.npz and more"),
        ("webdataset:///home/ann/{000..009}.tar", "{000..009}.tar"),
        ("http://[bad/x?y", "http://[bad/x"),
        ("local:/home/ann/x.npz", "local:x.npz"),
        ("a https://h/a?x=1 b /home/ann/c https://u:p@h/d e", "a https://h/a b c https://h/d e"),
        (
            "pipe:curl -H 'Authorization: Bearer abcdef' https://h/x?y",
            "pipe:curl -H 'Authorization: Bearer REDACTED' https://h/x",
        ),
        ("HF_TOKEN=abc python run.py", "HF_TOKEN=REDACTED python run.py"),
        ("WANDB_API_KEY=0123456789abcdef", "WANDB_API_KEY=REDACTED"),
        ("{'hub_token': 'abc', 'seed': 1}", "{'hub_token': REDACTED, 'seed': 1}"),
    ],
)
def test_addresses_and_assignments(text: str, redacted: str) -> None:
    assert redact_text(text) == redacted
    assert redact_text(redacted) == redacted


LABELS = dict.fromkeys(("/animal/mouse", "/device/mouse", "/m/01g317", "token", "a/b"), 0.5)  # no paths


@pytest.mark.parametrize(
    ("values", "redacted"),
    [
        ({"a": [{"password": "pw", "use_auth_token": True, "/home/ann/k": "/home/ann/my cats"}], "pooling": "token"},
         {"a": [{"password": "REDACTED", "use_auth_token": True, "k": "my cats"}], "pooling": "token"}),
        *([{"per_class": LABELS, "classes": {"iou": LABELS}, "settings": {"thresholds": LABELS}}] * 2,
          [{"labels": [*LABELS]}] * 2),
        ({"per_class": {f"/home/ann/{TOKENS[0]}": 1, f"/home/ann/{TOKENS[1]}": 2, "password": "pw"}},
         {"per_class": {"/home/ann/REDACTED": 1, "/home/ann/REDACTED (2)": 2, "password": "REDACTED"}}),
        ({"hub_token": ["a"], "api_key": {"b": "c"}, "headers": {"Authorization": "Bearer d"}},
         {"hub_token": ["REDACTED"], "api_key": {"b": "REDACTED"}, "headers": {"Authorization": "REDACTED"}}),
        ({"accuracies": {"token": [0.5], "auth": {"n": 3}}}, {"accuracies": {"token": [0.5], "auth": {"n": 3}}}),
        ({"per_class": {"token": {"ap": 0.5}}}, {"per_class": {"token": {"ap": 0.5}}}),
        ({"labels": "/home/ann/labels.csv"}, {"labels": "labels.csv"}),
        # No key takes the place of another.
        ({"/home/ann/x": 1, "x (2)": 2, "/home/eve/x": 3, "x": 4, "/home/ann lee/my cats": 5},
         {"x (3)": 1, "x (2)": 2, "x (4)": 3, "x": 4, "my cats": 5}),
    ],
)  # fmt: skip
def test_values_are_redacted_at_any_depth(values: dict, redacted: dict) -> None:
    assert redact_values(values) == redacted
    assert redact_values(redacted) == redacted


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (["/home/ann/.venv/bin/hf-vit", "demo"], "hf-vit demo"),
        (["/home/ann/src/hf_vit/__main__.py", "demo"], "hf-vit demo"),
        (["/home/ann/run.py", "--seed", "1"], "python run.py --seed 1"),
        (["../ann/run.py", "--seed", "1"], "python run.py --seed 1"),
        (["benchmarks/run.py", "--seed", "1"], "python benchmarks/run.py --seed 1"),
        (["hf-vit", "finetune", "--data", "/data/ann/cats and dogs"], "hf-vit finetune --data 'cats and dogs'"),
        (["hf-vit", "finetune", "--data=/data/ann/cats/"], "hf-vit finetune --data=cats"),
        (["run.py", "-o/home/ann/out", "-i~ann/cats", "-v"], "python run.py -oout -icats -v"),
        (["hf-vit", "evaluate", "../../ann/out"], "hf-vit evaluate out"),
        (["hf-vit", "evaluate", "~ann/out"], "hf-vit evaluate out"),
        (["hf-vit", "finetune", "--teacher", "timm:/home/ann/out"], "hf-vit finetune --teacher timm:out"),
        (["hf-vit", "finetune", "--teacher=timm:resnet18"], "hf-vit finetune --teacher=timm:resnet18"),
        (["hf-vit", "evaluate", "out/model", "--data", "digits"], "hf-vit evaluate out/model --data digits"),
        (["hf-vit", "evaluate", "me/vit", "--data", "you/cifar10"], "hf-vit evaluate me/vit --data you/cifar10"),
        ([r"C:\Users\ann\hf-vit.exe", "card", r"C:\Users\ann\out"], "hf-vit card out"),
        (["hf-vit", "finetune", "--set", "a=/home/ann/x,b=/home/ann/y"], "hf-vit finetune --set a=x,b=y"),
        ("hf-vit finetune --data '/data/ann/my cats' --model S/16", "hf-vit finetune --data 'my cats' --model S/16"),
        ("it's /home/ann/x", "it's x"),
        ("hf-vit convert 'http://u:pw@host/x.npz?X-Amz-Signature=abc' out", "hf-vit convert http://host/x.npz out"),
        (["hf-vit", "convert", "file:///home/ann/x.npz", "--sha256=ab"], "hf-vit convert x.npz --sha256=ab"),
        ("HF_TOKEN=ab/cd python run.py --seed 1", "HF_TOKEN=REDACTED python run.py --seed 1"),
        (f"{TOKENS[0]} push", "REDACTED push"),
        ("python run.py --hub_token abc --seed 1", "python run.py --hub_token REDACTED --seed 1"),
        ([], ""),
    ],
)  # fmt: skip
def test_commands_are_shown_without_their_places(typed: str | list[str], shown: str) -> None:
    assert redact_command(typed) == shown
