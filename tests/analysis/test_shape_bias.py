"""Shape bias: counts beside a loop, the reader of cue conflicts, and classifiers whose decisions are known."""

import json
import shutil

import numpy as np
import pytest
import torch
from evaluation.tiny import make_classifier, make_images, make_processor
from PIL import Image
from torch import nn
from torchvision.transforms.v2.functional import pil_to_tensor
from training.conftest import save_model

from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.analysis import analyze, open_cue_conflicts
from hf_vit.analysis.shape_bias import compute_shape_share, count_decisions, decide_classes
from hf_vit.errors import UserError
from hf_vit.loading.model import LoadedModel
from hf_vit.results.facts import Facts

CLASSES = ("ant", "bee", "cow")
SHADES = {name: 60 * place for place, name in enumerate(CLASSES)}


@pytest.fixture
def conflicts(tmp_path):
    """Two images of every shape with every texture: red tells the shape, blue the texture."""
    top = tmp_path / "conflicts"
    for shape in CLASSES:
        (top / shape).mkdir(parents=True)
        for texture in CLASSES:
            for number in (1, 12):
                image = Image.new("RGB", (8, 8), (SHADES[shape], 0, SHADES[texture]))
                image.save(top / shape / f"{shape}{number}-{texture}{number + 1}.png")
    return top


class Reads(nn.Module):
    """Classifies by one colour: a channel's shade is the class, and the class the label of `names`."""

    def __init__(self, channel, names=CLASSES):
        super().__init__()
        self.channel, self.names = channel, list(names)
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, pixel_values):
        shades = pixel_values[:, self.channel].mean(dim=(1, 2)) * 255 + self.shift
        wanted = torch.tensor([SHADES.get(name, 1000) for name in self.names])
        return -(shades[:, None] - wanted).abs()


class Named(LoadedModel):
    """A subject with named classes."""

    @property
    def label_sets(self):
        return [self.model.names]


def subject(channel, names=CLASSES):
    def prepare(images):
        return torch.stack([pil_to_tensor(image) / 255 for image in images])

    return Named(Reads(channel, names), prepare, "reader")


def test_decisions_equal_a_loop():
    generator = np.random.default_rng(0)
    decided, shapes, textures = generator.integers(0, 4, (3, 200))
    counts = count_decisions(decided, shapes.tolist(), textures.tolist(), 4)
    for name in range(4):
        own = [(d, s, t) for d, s, t in zip(decided, shapes, textures, strict=True) if s == name]
        by_shape = sum(d == s for d, s, t in own)
        by_texture = sum(d == t and d != s for d, s, t in own)
        assert counts[name].tolist() == [by_shape, by_texture, len(own) - by_shape - by_texture]
    np.testing.assert_allclose(compute_shape_share(counts), counts[:, 0] / (counts[:, 0] + counts[:, 1]))
    assert np.isnan(compute_shape_share(np.array([0, 0, 5])))


def test_a_class_has_the_mean_probability_of_its_labels():
    """Two labels at 0.3 each beat one at 0.25 and lose to one at 0.35; labels of no class do not count."""
    probabilities = torch.tensor([[0.3, 0.3, 0.25, 0.15], [0.2, 0.0, 0.35, 0.45]])
    assert decide_classes(probabilities, [(0, 1), (2,)]).tolist() == [0, 1]


def test_probabilities_of_a_multi_label_model_are_sigmoids(conflicts):
    """It always says bee, as only one of the ant's two labels is certain; their softmax would say ant."""
    model = make_classifier(("red ant", "black ant", "bee", "cow"), problem_type="multi_label_classification")
    nn.init.zeros_(model.classifier.weight)
    model.classifier.bias.data = torch.tensor([5.0, -5.0, 4.0, -9.0])
    options = {"cue_conflict": conflicts, "class_map": {"ant": ["red ant", "black ant"]}}
    run = analyze((model, make_processor()), only=["shape_bias"], device="cpu", **options)
    assert run["shape_bias"]["shape_bias"].tolist() == [0, 1, 0]


@pytest.mark.parametrize(("channel", "share"), [(0, 1.0), (2, 0.0)])
def test_readers_of_one_cue(conflicts, channel, share):
    run = analyze(subject(channel), only=["shape_bias"], cue_conflict=conflicts)
    found = run["shape_bias"]
    np.testing.assert_array_equal(found["shape_bias"], [share] * 3)
    np.testing.assert_array_equal(found["shape_bias_overall"], [share])
    assert found["decisions"].tolist() == [[4 * share, 4 - 4 * share, 0]] * 3
    assert run.summaries["shape_bias"]["decisions"] == {"shape": 12 * share, "texture": 12 - 12 * share, "other": 0}


def test_neither_cue(conflicts):
    """The green channel is 0 everywhere: always the first class, which is right by shape, by texture, or by none."""
    found = analyze(subject(1), only=["shape_bias"], cue_conflict=conflicts)["shape_bias"]
    assert found["decisions"].tolist() == [[4, 0, 0], [0, 2, 2], [0, 2, 2]]
    assert found["shape_bias"].tolist() == [1, 0, 0]
    assert found["shape_bias_overall"].tolist() == [0.5]


def test_the_reader(conflicts):
    (conflicts / "cow" / "cow3-bee9.png").write_bytes(b"no image")
    found = open_cue_conflicts(conflicts)
    assert found.classes == list(CLASSES)
    assert found.images.size == 12
    assert found.images.skipped == ["cow/cow3-bee9.png"]
    assert found.images.notes == ["6 images whose shape and texture have the same class were skipped"]
    for index, (shape, texture) in enumerate(zip(found.shapes, found.textures, strict=True)):
        assert found.images.read(index).getpixel((0, 0)) == (60 * shape, 0, 60 * texture)


def test_a_flat_folder_and_names_of_several_words(tmp_path):
    for name, image in zip(("polar bear1-cat2", "cat10-polar bear"), make_images(2), strict=True):
        image.save(tmp_path / f"{name}.png")
    found = open_cue_conflicts(tmp_path)
    assert found.classes == ["cat", "polar bear"]
    assert (found.shapes, found.textures) == ([0, 1], [1, 0])


def test_labels_of_a_model(conflicts, tmp_path):
    read = open_cue_conflicts(conflicts)
    plain = read.for_model(subject(0, ("Cow", "none", "bee", "ANT")))
    assert plain.labels == ((3,), (2,), (0,))
    assert read.for_model(subject(0, ("cow, ox", "a, ant", "bumble_bee, bee"))).labels == ((1,), (2,), (0,))
    mapped = {"ant": ["red ant", "black ant"]}
    (tmp_path / "map.json").write_text(json.dumps(mapped))
    names = ("black ant", "bee", "cow", "red ant")
    for given in (mapped, tmp_path / "map.json"):
        found = read.for_model(subject(0, names), given)
        assert found.labels == ((3, 0), (1,), (2,))
    synonyms = read.for_model(
        subject(0, ("bee", "cow", "tabby, tabby cat", "tiger cat")), {"ant": ["tabby", "tabby cat", "tiger cat"]}
    )
    assert synonyms.labels == ((2, 3), (0,), (1,)), "a label counts once"
    assert len({read.images.fingerprint, plain.images.fingerprint, found.images.fingerprint}) == 3


def test_what_does_not_fit_is_refused(conflicts, tmp_path):
    def refused(said, act, *given, **options):
        with pytest.raises(UserError, match=said):
            act(*given, **options)

    for_model, bare = open_cue_conflicts(conflicts).for_model, LoadedModel(nn.Linear(1, 1), torch.zeros, "bare")
    refused(r"reader has no label 'cow' \(class cow\); give --class-map FILE", for_model, subject(0, ("ant", "bee")))
    refused("has no class names", for_model, bare)
    for text, said in (("{", "not valid JSON"), ('{"ant": []}', "not a JSON object"), ("[]", "not a JSON object")):
        (tmp_path / "map.json").write_text(text)
        refused(said, for_model, subject(0), tmp_path / "map.json")
    refused("the class map .* does not exist", for_model, subject(0), tmp_path / "none.json")
    refused("is not a folder", open_cue_conflicts, tmp_path / "nowhere")
    refused("--images is missing", analyze, subject(0), only=["cka"], cue_conflict=conflicts)
    infinite = subject(0)
    infinite.model.forward = lambda pixel_values: torch.full((len(pixel_values), len(CLASSES)), torch.inf)
    refused("the model's outputs are NaN or infinite", analyze, infinite, only=["shape_bias"], cue_conflict=conflicts)
    said = "shape_bias cannot be applied: .* give --cue-conflict DIR"
    refused(said, analyze, subject(0), make_images(2), only=["shape_bias"])
    wrong = (conflicts / "bee" / "bee1-ant2.png").rename(conflicts / "cow" / "bee1-ant2.png")
    said = "bee1-ant2.png is in the folder cow, but its name states the shape bee"
    refused(said, open_cue_conflicts, conflicts)
    wrong.rename(conflicts / "cow" / "cow.png")
    refused("the file name cow.png does not state shape and texture", open_cue_conflicts, conflicts)


def test_the_command(conflicts, tmp_path, command):
    save_model(make_classifier(CLASSES), tmp_path / "model")
    typed = ["analyze", tmp_path / "model", "--cue-conflict", conflicts, "--only", "shape_bias", "--device", "cpu"]
    for folder in ("one", "two"):
        assert command(*typed, "--output", tmp_path / folder)[0] == 0
    contents = [{path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()} for folder in ("one", "two")]
    assert set(contents[0]) == {"shape_bias.json", "shape_bias.png", "report.html"}
    assert contents[0] == contents[1]
    page = contents[0]["report.html"].decode()
    assert "Analyzed with 12 images of conflicts" in page
    assert "classes: ant, bee, cow" in page
    record = Facts.load(tmp_path / "model").filter_kind("analysis")[0]
    assert sum(record.values["analyses"]["shape_bias"]["decisions"].values()) == 12
    (tmp_path / "photos").mkdir()
    for number, image in enumerate(make_images(2)):
        image.save(tmp_path / "photos" / f"{number}.png")
    both = ("--images", tmp_path / "photos", "--only", "attention_entropy", "--output", tmp_path / "three")
    assert command(*typed, *both)[0] == 0
    records = Facts.load(tmp_path / "model").records[-2:]
    assert [(record.data.name, record.data.size) for record in records] == [("photos", 2), ("conflicts", 12)]
    for record, name in zip(records, ("attention_entropy", "shape_bias"), strict=True):
        assert (set(record.values["analyses"]), set(record.values["pictures"])) == ({name}, {f"analysis_{name}.png"})
    options = dict(only=["attention_entropy", "shape_bias"], cue_conflict=conflicts, device="cpu")
    run = analyze(tmp_path / "model", tmp_path / "photos", tmp_path / "four", **options)
    seconds = [record.seconds for record in Facts.load(tmp_path / "model").records[-2:]]
    assert sum(seconds) == pytest.approx(run.seconds, abs=2e-3)  # each has its own


def test_the_result_of_an_optimized_model_is_not_that_of_the_model_as_loaded(conflicts, tmp_path):
    torch.manual_seed(0)
    config = HfViTConfig(image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    config.id2label = dict(enumerate(CLASSES))
    save_model(HfViTForImageClassification(config), tmp_path / "model")
    for path in list(conflicts.rglob("*.png")):  # as many images as pay
        shutil.copy(path, path.with_name(path.name.replace("1", "3", 1)))
    options = dict(output=tmp_path / "out", only="shape_bias", cue_conflict=conflicts, device="cpu")
    assert analyze(tmp_path / "model", **options, optimize=True).engine == "torch"
    with pytest.raises(UserError, match=r"shape_bias.json was measured with --optimize; add --optimize, choose"):
        analyze(tmp_path / "model", **options)
