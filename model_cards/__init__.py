"""The model card's template, as package data; `hf_vit.hub.card` renders it."""
