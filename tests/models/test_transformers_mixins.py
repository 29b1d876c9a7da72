"""transformers' own tests of a model and of a backbone (tests/transformers_mixins.py)."""

import contextlib
import unittest
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers_mixins
from models.families import FAMILIES, HEADS, Family
from transformers.testing_utils import torch_device

if not transformers_mixins.FOLDER.is_dir():
    pytest.skip("run `python tests/transformers_mixins.py` to download them", allow_module_level=True)

common = transformers_mixins.load("test_modeling_common")
backbone = transformers_mixins.load("test_backbone_common")

# Some of their cases ask for attentions under sdpa, of which ours warn (test_attention.py).
pytestmark = pytest.mark.filterwarnings("ignore:output_attentions=True returns no attentions:UserWarning")

# What transformers knows of its own models by name; copies in the test module's namespace, so that nothing leaks.
for mapping, head in {
    "MODEL_MAPPING_NAMES": "model",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "classification",
    "MODEL_FOR_BACKBONE_MAPPING_NAMES": "backbone",
}.items():
    ours = {family.config_class.model_type: family.classes[head].__name__ for family in FAMILIES.values()}
    setattr(common, mapping, {**getattr(common, mapping), **ours})

# The mixin sets epsilons under the names of all models; a name that is no field of a configuration warns.
common.set_config_for_less_flaky_test = lambda config: setattr(config, "layer_norm_eps", 1.0)


class TinyCase:
    """What the mixins ask of a model: a small configuration and its inputs."""

    batch_size, num_hidden_layers, num_attention_heads, hidden_size = 3, 2, 4, 32
    is_training, num_masks, num_channels = True, 1, 3

    def __init__(self, family: Family) -> None:
        self.family = family
        config = self.get_config()
        self.seq_length, (h, w) = family.num_tokens(config), config.grid
        self.mask_length = h * w

    def get_config(self) -> Any:
        one_stage = {"image_size": 16, "stage_depths": (1,)} if self.family.name == "hybrid" else {}
        return self.family.config(
            attn_implementation="eager", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, **one_stage
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        config = self.get_config()
        return config, {"pixel_values": self.family.images(config, self.batch_size).to(torch_device)}


OF_IMAGES = ("pad_left_no_attn_mask_sdpa_kernels", "output_attentions")


class InParts(unittest.TestCase):
    """The first part of a test that fails ends it and is named: reports of thousands of subtests take seconds."""

    @contextlib.contextmanager
    def subTest(self, msg: Any = None, **values: Any) -> Iterator[None]:  # noqa: N802
        try:
            yield
        except unittest.SkipTest:
            pass
        except Exception as error:
            error.add_note(f"{msg} {values}")
            raise


def model_tests(family: Family) -> type:
    class Tests(common.ModelTesterMixin, InParts):
        all_model_classes = tuple(family.classes.values())
        test_resize_embeddings = False
        # Left out: cases that differ in `attention_mask`, which is for words and changes nothing of an image model's
        # inputs, or in torch's kernels, all of which are allowed.
        for name in vars(common.ModelTesterMixin):
            if name.startswith("test_eager_matches_sdpa_inference") and not name.endswith(OF_IMAGES):
                vars()[name] = None

        def setUp(self) -> None:
            self.model_tester = TinyCase(family)

        def _prepare_for_class(self, inputs_dict: Any, model_class: type, return_labels: bool = False) -> Any:
            """Masks for the head that corrupts patches, and for no other."""
            inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
            if model_class is not family.classes["masked_prediction"]:
                inputs.pop("bool_masked_pos", None)
            elif return_labels:
                inputs |= HEADS["masked_prediction"].labels(self.model_tester.get_config(), inputs["pixel_values"])
            return inputs

        def test_bc_torch_dtype(self) -> None:
            """Of one class, for all have one `from_pretrained`: the mixin prints every parameter seven times."""
            self.all_model_classes = self.all_model_classes[:1]
            super().test_bc_torch_dtype()

        def test_model_get_set_embeddings(self) -> None:
            """As transformers' ViT has it, in place of the mixin's for words."""
            for model_class in self.all_model_classes:
                model = model_class(family.config())
                assert isinstance(model.get_input_embeddings(), torch.nn.Module)
                assert model.get_output_embeddings() is None

        if len(family.attentions_of(torch.zeros(1, 1), (1, 1))) > 1:
            # The mixin counts one attention a layer; test_attention.py holds what these give.
            test_attention_outputs = None

    return Tests


def backbone_tests(family: Family) -> type:
    class Tests(backbone.BackboneTesterMixin, InParts):
        all_model_classes = (family.classes["backbone"],)
        config_class = family.config_class

        def setUp(self) -> None:
            self.model_tester = TinyCase(family)

    return Tests


# Axial and plain blocks are implementations of their own; the others hold the plain family's.
for row in FAMILIES.values():
    for kind, tests in {"Models": model_tests(row), "Backbone": backbone_tests(row)}.items():
        tests.pytestmark = [] if row.name in ("plain", "axial") else [pytest.mark.slow]  # the same code again
        globals()[f"Test{row.name.title()}{kind}"] = tests
