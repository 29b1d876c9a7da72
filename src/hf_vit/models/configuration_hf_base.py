"""What every configuration of the package inherits: the classes it stands for, and the code that is saved with it."""

import os
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub import hf_hub_download
from transformers.backbone_utils import BackboneConfigMixin
from transformers.configuration_utils import PreTrainedConfig


class HfBaseConfig(BackboneConfigMixin, PreTrainedConfig):
    """Abstract: a configuration is saved with the code that its models run, so that they load without the package.

    Config fields of a backbone:
        out_features, out_indices: which of "stem", "stage1", ... it gives; by default the last.

    Class attributes:
        auto_classes: the class for each Auto class, "module.Class": all that load from one saved folder.
        code_files: every module that these need. The siblings that an import names are among them.
    """

    auto_classes: ClassVar[dict[str, str]]
    code_files: ClassVar[tuple[str, ...]]

    @property
    def num_stages(self) -> int:
        """Stages of a backbone after its stem."""
        raise NotImplementedError(f"{type(self).__name__} is abstract: use the configuration of a family")

    @property
    def stage_names(self) -> list[str]:
        return ["stem", *(f"stage{index}" for index in range(1, self.num_stages + 1))]

    def set_output_features_output_indices(self, out_features: list[str] | None, out_indices: Any) -> None:
        """As transformers', but None stays None: the last stage, however many layers the model comes to have."""
        self._out_features = self._out_indices = None
        if out_features is not None or out_indices is not None:
            super().set_output_features_output_indices(out_features, out_indices)

    @property
    def out_features(self) -> list[str]:
        return self._out_features or self.stage_names[-1:]

    @out_features.setter
    def out_features(self, out_features: list[str] | None) -> None:
        self.set_output_features_output_indices(out_features, None)

    @property
    def out_indices(self) -> list[int]:
        return self._out_indices or [self.num_stages]

    @out_indices.setter
    def out_indices(self, out_indices: tuple[int, ...] | list[int] | None) -> None:
        self.set_output_features_output_indices(None, out_indices)

    def take_stages(self, given: dict[str, Any]) -> None:
        """Read `out_features` and `out_indices` of a backbone out of what a configuration was given."""
        given.pop("stage_names", None)  # of a file: they follow from the number of stages
        self.set_output_features_output_indices(given.pop("out_features", None), given.pop("out_indices", None))

    def validate_stages(self) -> None:
        if self._out_features is None and self._out_indices is None:
            return
        self.verify_out_features_out_indices()

    @property
    def nominal_size(self) -> tuple[int, int]:
        """(height, width) of the nominal image in px."""
        size = self.image_size
        return (size, size) if isinstance(size, int) else (size[0], size[1])

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """As transformers', with code and `auto_map`.

        Classes of another module that `auto_map` names stay in it where their code stands in the folder; the family's
        fill in the others. A model that was loaded without the package brought along what its own class needs; the
        siblings are fetched from where it came. Where that is gone, `auto_map` leaves out the classes that could not
        be loaded again.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        family = next(base for base in type(self).__mro__ if "auto_classes" in vars(base))
        missing = [name for name in self.code_files if not self._copy_code(f"{name}.py", folder, family)]
        self.auto_map = self._classes_in(folder, family, missing)
        if missing:
            warnings.warn(
                f"{', '.join(f'{name}.py' for name in missing)} could not be fetched from {self.name_or_path!r}; "
                f"{save_directory} loads without the package by {', '.join(self.auto_map)} alone",
                UserWarning,
                stacklevel=2,
            )
        super().save_pretrained(save_directory)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", folder.name), **kwargs)

    def _classes_in(self, folder: Path, family: type, missing: list[str]) -> dict[str, str]:
        """What `auto_map` says of a folder: its own classes, and those of the family that load beside them."""
        given: Any = getattr(self, "auto_map", None)
        given = given if isinstance(given, dict) else {}
        own = {auto_class: target for auto_class, target in given.items() if self._is_own(target, folder)}
        module, name = type(self).__module__.rpartition(".")[2], type(self).__name__
        is_registered = self._auto_class is not None and module != "__main__"
        if type(self) is not family and (is_registered or (folder / f"{module}.py").is_file()):
            own["AutoConfig"] = f"{module}.{name}"
        elif type(self) is not family:
            warnings.warn(
                f"{name} is not registered, so {folder} loads with {family.__name__} in its place; call "
                f"{name}.register_for_auto_class() before saving",
                UserWarning,
                stacklevel=3,
            )
        ours = {key: target for key, target in self.auto_classes.items() if target.partition(".")[0] not in missing}
        if "AutoConfig" in given:  # a place that is not ours there, or empty, was left to another class
            ours = {auto_class: target for auto_class, target in ours.items() if given.get(auto_class) == target}
        if own.get("AutoConfig", family.__name__).rpartition(".")[2] != family.__name__:
            ours = {}  # transformers refuses models of a configuration of another name
            if not own.keys() - {"AutoConfig"}:
                warnings.warn(
                    f"no model of {name} is registered, so {folder} loads no model without the package; derive one "
                    f"with config_class = {name} and call its register_for_auto_class before saving",
                    UserWarning,
                    stacklevel=3,
                )
        return ours | own

    def _is_own(self, target: object, folder: Path) -> bool:
        """Whether `auto_map` names a class whose code is no part of the family and stands in the folder."""
        module, _, name = str(target).partition(".")
        is_name = module.isidentifier() and name.isidentifier()
        return is_name and module not in self.code_files and (folder / f"{module}.py").is_file()

    def _copy_code(self, name: str, folder: Path, family: type) -> bool:
        """Whether the file now stands in the folder: from beside the family's class, or where the config came from."""
        here = Path(str(sys.modules[family.__module__].__file__)).parent
        source = here / name
        if not source.is_file():
            # Code of the Hub is kept under its commit, which is the one to go on with.
            revision = here.name if re.fullmatch("[0-9a-f]{40}", here.name) else None
            origin = str(self.name_or_path)
            try:
                at_hub = not os.path.isdir(origin)
                source = Path(hf_hub_download(origin, name, revision=revision) if at_hub else f"{origin}/{name}")
            except (OSError, ValueError):  # not to be had, or the name of no repository
                pass
        if not source.is_file():
            return (folder / name).is_file()  # transformers copied what the model's own class imports
        if source.resolve() != (folder / name).resolve():
            shutil.copyfile(source, folder / name)
        return True
