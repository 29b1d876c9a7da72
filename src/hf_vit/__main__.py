"""`python -m hf_vit` is the `hf-vit` program."""

from hf_vit_cli.main import main

main()
