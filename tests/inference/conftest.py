"""The families and choices of the contract tests, here too; and an attention that no library has."""

from typing import Any

from models.conftest import pytest_generate_tests  # noqa: F401 (a hook of pytest)
from transformers import AttentionInterface

from hf_vit.models.modeling_hf_vit import eager_attention_forward


def attend_to_twice_the_values(model: Any) -> None:
    """Give a model an attention function of one's own."""

    def attend(module: Any, query: Any, key: Any, value: Any, *given: Any, **options: Any) -> Any:
        return eager_attention_forward(module, query, key, value * 2, *given, **options)

    AttentionInterface.register("twice_the_values", attend)
    model.set_attn_implementation("twice_the_values")
