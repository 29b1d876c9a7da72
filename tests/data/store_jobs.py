"""What the tests of object stores run in client processes."""

from hf_vit.data import load_data


def load_uploaded(folder: str) -> str:
    """The fingerprint of a folder of images that lies in a repository of the Hub, by its address."""
    from huggingface_hub import HfApi

    HfApi().create_repo("alice/pets", repo_type="dataset")
    HfApi().upload_folder(repo_id="alice/pets", repo_type="dataset", folder_path=folder, path_in_repo="in/pets")
    return load_data("hf://datasets/alice/pets/in/pets").fingerprint
