"""The keys and shapes of one file, held against its origin's key table: what is missing, left over or misshapen."""

import re
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from hf_vit.conversion.origins.origin import WITHOUT, KeyNames, KeyRule, Origin
from hf_vit.conversion.readers.checkpoint import Shape
from hf_vit.conversion.sizes import size_text
from hf_vit.errors import UserError

SHOWN = 8  # names a message lists before it only counts
MAX_DEPTH = 1000  # an absurd block number would make an absurd list of missing keys; it is left over instead


@dataclass(frozen=True)
class Layout:
    """One file under one key table; all keys are in the table's normal form."""

    origin: Origin
    names: KeyNames
    shapes: Mapping[str, Shape]

    @cached_property
    def depth(self) -> int:
        """Number of blocks: as many as the highest number says, so that a gap is noticed; or as are stacked."""
        if any(rule.stacked for rule in self.rules):
            if not 0 < self.dims.get("N", 0) <= MAX_DEPTH:
                raise UserError(f"the file stacks {self.dims.get('N', 0)} encoder blocks; it is damaged or no ViT")
            return self.dims["N"]
        blocks = {int(found[1]) for key in self.names.normal if (found := re.match(self.origin.block_pattern, key))}
        possible = [block for block in blocks if block < MAX_DEPTH]
        if not possible:
            raise UserError("the file holds no encoder block; it is damaged or of another kind")
        return max(possible) + 1

    @cached_property
    def normal_shapes(self) -> dict[str, Shape]:
        return {name: self.shapes[key] for name, key in self.names.normal.items()}

    @cached_property
    def rules(self) -> tuple[KeyRule, ...]:
        """The origin's key table for this file; only the blocks of the Transformer are still one line for all."""
        rules_of = self.origin.rules_of
        return self.origin.rules if rules_of is None else rules_of(self.origin.rules, self.normal_shapes)

    @cached_property
    def parts(self) -> frozenset[str]:
        """The optional parts of which the file has at least one key."""
        optional = (rule for rule in self.rules if rule.part and not rule.part.startswith(WITHOUT))
        return frozenset(rule.part for rule in optional if self._has_any(rule))

    def _is_needed(self, rule: KeyRule) -> bool:
        if rule.part.startswith(WITHOUT):
            return rule.part.removeprefix(WITHOUT) not in self.parts
        return not rule.part or rule.part in self.parts

    def _has_any(self, rule: KeyRule) -> bool:
        blocks = range(self.depth) if rule.in_block else (0,)
        return any(rule.at(block).key in self.names.normal for block in blocks)

    @cached_property
    def expected(self) -> dict[str, KeyRule]:
        """Key -> rule, for every key that the file must have."""
        rules: list[KeyRule] = []
        for rule in self.rules:
            if self._is_needed(rule):
                rules += [rule.at(block) for block in range(self.depth)] if rule.in_block else [rule]
        return {rule.key: rule for rule in rules}

    @cached_property
    def present(self) -> dict[str, KeyRule]:
        return {name: rule for name, rule in self.expected.items() if name in self.names.normal}

    @cached_property
    def dims(self) -> dict[str, int]:
        """Size of every axis letter: what most arrays say, so that one wrong array is the one that is named.

        Ties go to the arrays of fewest axes: a bias cannot be transposed.
        """
        votes: dict[str, Counter[int]] = defaultdict(Counter)
        for name, rule in sorted(self.present.items(), key=lambda item: len(item[1].axes)):
            axes, shape = self.axes(rule), self.shape(name)
            if len(axes) == len(shape):
                for axis, size in zip(axes, shape, strict=True):
                    factor, letter = axis_factor(axis)
                    if letter and size % factor == 0:
                        votes[letter][size // factor] += 1
        return {letter: sizes.most_common(1)[0][0] for letter, sizes in votes.items()}

    def axes(self, rule: KeyRule) -> list[str]:
        """The rule's axes, read with the parts that the file has."""
        axes = list(rule.axes)
        for part, others in self.origin.without.items():
            if part not in self.parts:
                axes = [others.get(axis, axis) for axis in axes]
        return axes

    def size(self, axis: str) -> int:
        """Size of an axis such as "D", "4W" or "3"; 0 if no array tells."""
        factor, letter = axis_factor(axis)
        return factor * self.dims.get(letter, 0) if letter else factor

    def shape(self, name: str) -> Shape:
        return self.normal_shapes[name]

    def refuse_misfits(self) -> None:
        """Raise a UserError that lists every key missing, left over or of a wrong shape; return if there is none."""
        for pattern, reason in self.origin.refused.items():
            found = next((key for name, key in self.names.normal.items() if re.fullmatch(pattern, name)), None)
            if found is not None:
                self._refuse_feature(f"{reason} ('{found}')")
        missing = [name for name in self.expected if name not in self.present]
        for pattern, reason in self.origin.lacking.items():
            expected = {name for name in self.expected if re.fullmatch(pattern, name)}
            if expected and expected <= set(missing):
                self._refuse_feature(reason)
        refuse(
            listing("keys missing", [self.names.spell(name) for name in self._whole_blocks(missing)], len(missing)),
            listing("keys left over", [key for name, key in self.names.normal.items() if name not in self.expected]),
            listing("keys of a wrong shape", [told for name in self.present if (told := self._misshapen(name))]),
        )

    def _refuse_feature(self, feature: str) -> NoReturn:
        remedy = f"use it with {self.origin.package} itself" if self.origin.package else "nothing is written"
        raise UserError(f"the checkpoint has {feature}, which no model here has; {remedy}")

    def _misshapen(self, name: str) -> str:
        """What is wrong with an array's shape, or ""."""
        shape, axes = self.shape(name), self.axes(self.present[name])
        needed = tuple(self.size(axis) for axis in axes)
        if shape == needed and all(shape):
            return ""
        hint = ", it looks transposed" if sorted(shape) == sorted(needed) else ""
        want = "x".join(str(self.size(axis) or axis) for axis in axes)
        return f"{self.names.normal[name]} is {size_text(shape)} (needs {want}{hint})"

    def _whole_blocks(self, missing: Sequence[str]) -> list[str]:
        """The missing keys, with a wholly missing block said in one word: "Transformer/encoderblock_1/*"."""
        in_block = sum(rule.in_block and self._is_needed(rule) for rule in self.rules)
        blocks = {name: found[0] for name in missing if (found := re.match(self.origin.block_pattern, name))}
        counts = Counter(blocks.values())
        whole = [
            f"{blocks[name]}*" if name in blocks and counts[blocks[name]] == in_block else name for name in missing
        ]
        return list(dict.fromkeys(whole))


def axis_factor(axis: str) -> tuple[int, str]:
    """ "4W" -> (4, "W"), "D" -> (1, "D"), "3" -> (3, "")."""
    number = re.match(r"\d*", axis)[0]  # pyright: ignore[reportOptionalSubscript] (it always matches)
    return int(number or 1), axis[len(number) :]


def listing(what: str, names: Sequence[str], count: int | None = None) -> str:
    """ "3 keys missing: a, b, c", or "" for none."""
    if not names:
        return ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names) if count is None else count} {what}: {', '.join(names[:SHOWN])}{more}"


@contextmanager
def naming(file_name: str) -> Generator[None]:
    """Names the checkpoint in every UserError within that does not."""
    try:
        yield
    except UserError as error:
        if file_name in str(error):
            raise
        raise UserError(f"{file_name}: {error}") from error


def refuse(*problems: str) -> None:
    """Raise a UserError that says all problems in one line, if there is any."""
    told: Iterable[str] = [problem for problem in problems if problem]
    if told:
        raise UserError("the checkpoint does not map completely, so nothing is written; " + "; ".join(told))
